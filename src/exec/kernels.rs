//! Pipelines by kernel: built when first used, several at a time, with a progress line when that
//! takes long. `Launch` is one dispatch as data.

use super::grid;
use crate::error::{Error, Result};
use crate::push::{self, PushConstants};
use crate::vk::{Device, Pipeline, PipelineInfo, Subgroups};
use glam::UVec3;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Which pipeline: a module and its specialization constants, the workgroup size first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelKey {
    /// `mul_mat_vec.q4_k`
    pub module: String,
    /// Constants with ids 0 to n.
    pub spec: Vec<u32>,
}

impl KernelKey {
    /// The kernel of a shader without variants.
    pub fn new<P: PushConstants>(spec: &[u32]) -> Self {
        KernelKey { module: P::SHADER.to_string(), spec: spec.to_vec() }
    }

    /// The kernel of a tensor type: `mul_mat`, Q4_K: `mul_mat.q4_k`.
    pub fn of_type<P: PushConstants>(ty: crate::gguf::GgmlType, spec: &[u32]) -> Self {
        Self::of_parts(&[P::SHADER, &ty.name().to_lowercase()], spec)
    }

    /// Its variant with activations of two bytes: `mul_mat_vec`, Q4_K: `mul_mat_vec.int16.q4_k`.
    pub fn of_type_int16<P: PushConstants>(ty: crate::gguf::GgmlType, spec: &[u32]) -> Self {
        Self::of_parts(&[P::SHADER, "int16", &ty.name().to_lowercase()], spec)
    }

    fn of_parts(parts: &[&str], spec: &[u32]) -> Self {
        KernelKey { module: parts.join("."), spec: spec.to_vec() }
    }
}

/// A storage buffer of a launch, before addresses are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Bytes of the scratch arena.
    Scratch {
        /// Start.
        offset: u64,
        /// Length.
        bytes: u64,
    },
    /// Positions of the ubatch's tokens, u32.
    Positions,
    /// The word in which kernels report what they found wrong.
    Status,
    /// A layer's keys or values.
    Kv {
        /// Layer.
        il: u32,
        /// Which.
        half: crate::graph::KvHalf,
    },
}

/// One dispatch as data.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Pipeline.
    pub kernel: KernelKey,
    /// Push constants, as bytes.
    pub push: Vec<u8>,
    /// Storage buffers from binding 0.
    pub bindings: Vec<Bound>,
    /// Workgroups.
    pub groups: UVec3,
    /// How several dispatches may do it.
    pub cuts: Cuts,
    /// It need not wait for its op's step before it.
    pub beside: bool,
}

/// Along which side a grid may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cuts {
    /// The longest: every workgroup has work of its own.
    Any,
    /// z: along x and y, workgroups share the work by their number, and fewer would do it all again.
    Z,
}

impl Launch {
    /// A launch over a grid. The struct's type names the shader, so they cannot disagree.
    pub fn new<P: PushConstants>(
        kernel: KernelKey,
        push: P,
        bindings: &[Bound],
        groups: UVec3,
    ) -> Self {
        debug_assert_eq!(kernel.module.split('.').next(), Some(P::SHADER));
        let push = bytemuck::bytes_of(&push).to_vec();
        Launch { kernel, push, bindings: bindings.to_vec(), groups, cuts: Cuts::Any, beside: false }
    }

    /// The same for a kernel that strides over x and y by the number of workgroups.
    pub fn striding(self) -> Self {
        Launch { cuts: Cuts::Z, ..self }
    }

    /// A launch over a list of items, folded into a grid.
    pub fn over<P: PushConstants>(
        kernel: KernelKey,
        push: P,
        bindings: &[Bound],
        items: u64,
    ) -> Self {
        Self::new(kernel, push, bindings, grid::fold(items))
    }
}

/// The pipelines built so far.
pub struct Kernels {
    device: Arc<Device>,
    built: HashMap<KernelKey, Pipeline>,
}

/// Compiling is silent up to here.
const QUIET: Duration = Duration::from_millis(1500);

impl Kernels {
    /// None yet.
    pub fn new(device: Arc<Device>) -> Self {
        Kernels { device, built: HashMap::new() }
    }

    /// Builds those of `keys` that are missing, on all cores. Whether any were.
    pub fn prepare<'a>(&mut self, keys: impl Iterator<Item = &'a KernelKey>) -> Result<bool> {
        let mut missing: Vec<&KernelKey> = keys.filter(|k| !self.built.contains_key(*k)).collect();
        missing.sort();
        missing.dedup();
        if missing.is_empty() {
            return Ok(false);
        }
        let (device, next) = (&self.device, AtomicUsize::new(0));
        let progress = SlowProgress::new(missing.len());
        let results = Mutex::new(Vec::with_capacity(missing.len()));
        let work = || {
            while let Some(key) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                let pipeline = build(device, key);
                let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                results.push(((*key).clone(), pipeline));
                progress.advance(results.len());
            }
        };
        let n_threads =
            std::thread::available_parallelism().map_or(1, usize::from).min(missing.len());
        std::thread::scope(|scope| {
            for _ in 1..n_threads {
                scope.spawn(work);
            }
            work();
        });
        for (key, pipeline) in results.into_inner().unwrap_or_else(PoisonError::into_inner) {
            self.built.insert(key, pipeline?);
        }
        Ok(true)
    }

    /// A pipeline that [`prepare`](Self::prepare) has built.
    pub fn get(&self, key: &KernelKey) -> Result<&Pipeline> {
        self.built.get(key).ok_or_else(|| Error::Vulkan {
            action: format!("use the pipeline {} before it is built", key.module),
            result: ash::vk::Result::ERROR_UNKNOWN,
        })
    }
}

fn build(device: &Arc<Device>, key: &KernelKey) -> Result<Pipeline> {
    let module = push::module(&key.module).ok_or_else(|| Error::Vulkan {
        action: format!("find the shader module {}", key.module),
        result: ash::vk::Result::ERROR_INVALID_SHADER_NV,
    })?;
    Pipeline::new(
        device,
        &PipelineInfo {
            name: module.name,
            spirv: &module.spirv,
            n_bindings: module.bindings,
            push_bytes: module.push_bytes,
            spec: &key.spec,
            subgroups: subgroups(device, key.spec.first().copied().unwrap_or(0)),
        },
    )
}

/// Kernels that give each subgroup a row need full ones, and of the size that the workgroups were
/// chosen for, where a pipeline can ask for it.
fn subgroups(device: &Device, workgroup: u32) -> Subgroups {
    let sizes = device.info().subgroup;
    match workgroup.is_multiple_of(sizes.default) {
        true if sizes.selectable => Subgroups::FullOf(sizes.default),
        true => Subgroups::Full,
        false => Subgroups::Any,
    }
}

/// A progress line that appears only when the work takes long.
struct SlowProgress {
    since: Instant,
    bar: indicatif::ProgressBar,
}

impl SlowProgress {
    fn new(n: usize) -> Self {
        let bar = crate::progress::hidden_bar("compiling kernels", n as u64);
        SlowProgress { since: Instant::now(), bar }
    }

    fn advance(&self, done: usize) {
        if self.since.elapsed() > QUIET {
            crate::progress::show(&self.bar);
        }
        self.bar.set_position(done as u64);
    }
}

impl Drop for SlowProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
