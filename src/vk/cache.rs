//! The pipeline cache and its file: a BLAKE3 hash, then the driver's bytes. A file that is damaged,
//! of another device or of another driver is ignored.
#![allow(unsafe_code, reason = "creates, reads and destroys the VkPipelineCache")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ash::vk;

use super::debug;
use super::info::DeviceInfo;
use super::lock;
use super::raw::RawDevice;
use crate::Result;

/// Where compiled pipelines are kept between runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CacheFile {
    /// In the user's cache directory, one file for each device and driver.
    #[default]
    User,
    /// In this directory.
    In(PathBuf),
    /// Nowhere.
    None,
}

impl CacheFile {
    /// The directory, if there is one.
    pub fn directory(&self) -> Option<PathBuf> {
        match self {
            CacheFile::User => dirs::cache_dir().map(|dir| dir.join("vkmoe")),
            CacheFile::In(directory) => Some(directory.clone()),
            CacheFile::None => None,
        }
    }
}

/// Owner of the VkPipelineCache.
pub(super) struct PipelineCache {
    raw: Arc<RawDevice>,
    cache: vk::PipelineCache,
    path: Option<PathBuf>,
    /// Hash of the file's content, so that an unchanged cache is not written again.
    saved: Mutex<Option<blake3::Hash>>,
}

impl PipelineCache {
    pub(super) fn open(raw: &Arc<RawDevice>, info: &DeviceInfo, file: &CacheFile) -> Result<Self> {
        let path = file.directory().map(|directory| directory.join(file_name(info)));
        let data = path.as_deref().and_then(|path| load(path, info)).unwrap_or_default();
        let create = vk::PipelineCacheCreateInfo::default().initial_data(&data);
        // SAFETY: the device lives as long as `raw`; the data is unchanged since this driver wrote it.
        let cache = unsafe { raw.vk().create_pipeline_cache(&create, None) }
            .map_err(|result| raw.error("create the pipeline cache", result))?;
        debug::name(raw, cache, "pipeline_cache");
        let saved = Mutex::new((!data.is_empty()).then(|| blake3::hash(&data)));
        Ok(Self { raw: raw.clone(), cache, path, saved })
    }

    pub(super) fn vk(&self) -> vk::PipelineCache {
        self.cache
    }

    /// Writes the file if the cache changed; what goes wrong is only logged.
    pub(super) fn save(&self) {
        let Some(path) = &self.path else { return };
        // SAFETY: the cache is owned here, and internally synchronized.
        let data = match unsafe { self.raw.vk().get_pipeline_cache_data(self.cache) } {
            Ok(data) => data,
            Err(result) => return log::debug!("the pipeline cache cannot be read: {result}"),
        };
        let hash = blake3::hash(&data);
        let mut saved = lock(&self.saved);
        if *saved == Some(hash) {
            return;
        }
        match replace_file(path, &[hash.as_bytes().as_slice(), &data].concat()) {
            Ok(()) => *saved = Some(hash),
            Err(error) => log::info!("{}: cannot write: {error}", path.display()),
        }
    }
}

impl Drop for PipelineCache {
    fn drop(&mut self) {
        if !self.raw.is_lost() {
            self.save();
        }
        // SAFETY: owned here; pipelines hold an `Arc` of the `Device` that owns this.
        unsafe { self.raw.vk().destroy_pipeline_cache(self.cache, None) };
    }
}

/// `pipelines-<vendor>-<device>-<driver>-<uuid>.bin`
fn file_name(info: &DeviceInfo) -> String {
    let uuid = info.cache_uuid();
    let (vendor, device, driver) = (info.vendor.id(), info.device_id, info.driver_number);
    format!("pipelines-{vendor:x}-{device:x}-{driver:x}-{uuid}.bin")
}

/// The driver's bytes in a file, if they are whole and of this device and driver.
fn load(path: &Path, info: &DeviceInfo) -> Option<Vec<u8>> {
    let file = fs::read(path).ok()?;
    let (hash, data) = file.split_at_checked(blake3::OUT_LEN)?;
    if blake3::hash(data).as_bytes() != hash || !is_of(data, info) {
        log::info!("{}: damaged or of another driver, ignored", path.display());
        return None;
    }
    Some(data.to_vec())
}

/// Compares `VkPipelineCacheHeaderVersionOne` (little-endian: length, version, vendor, device, uuid).
fn is_of(data: &[u8], info: &DeviceInfo) -> bool {
    let mut expected = Vec::with_capacity(32);
    for word in [32, 1, info.vendor.id(), info.device_id] {
        expected.extend_from_slice(&u32::to_ne_bytes(word));
    }
    expected.extend_from_slice(&info.pipeline_cache_uuid);
    data.starts_with(&expected)
}

/// Writes beside the file and renames, so that a reader never sees half of it.
pub(crate) fn replace_file(path: &Path, data: &[u8]) -> std::io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&temporary, data)?;
    fs::rename(&temporary, path).inspect_err(|_| {
        // The error that matters is the caller's.
        let _ = fs::remove_file(&temporary);
    })
}
