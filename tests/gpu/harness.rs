//! The device under test, shared by the tests that run at a time, with the validation layer.
//!
//! `VKMOE_VALIDATION` chooses the checks (core by default; `sync`, `gpu`, `off`),
//! `GGML_VK_VISIBLE_DEVICES` the device. A test asks for [`gpu`] and drops it at its end, where any
//! message of the layer fails it.

use crate::vulkan::validation;
use glam::UVec3;
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use vkmoe::push::{PushConstants, module};
use vkmoe::vk::{
    Binding, Buffer, Device, DeviceInfo, DeviceOptions, Instance, InstanceOptions, Lane,
    MemoryKind, Pipeline, PipelineInfo, Recorder, Replay, Subgroups, Validation, choose,
};

/// Bytes that decoders may read past the last row.
const WEIGHT_PADDING: usize = 64;
/// `GRID_FOLD` of shaders/include/common.glsl.
const GRID_FOLD: u32 = 32768;

static GPU: Mutex<Weak<Gpu>> = Mutex::new(Weak::new());
/// Keeps the device open between tests, but not under GPU-assisted checks: a device that is open when
/// the process ends makes layer 1.4.309 abort it.
static KEPT: OnceLock<Arc<Gpu>> = OnceLock::new();

/// The device, for one test.
pub(crate) fn gpu() -> Checked {
    let mut shared = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = shared.upgrade().unwrap_or_else(|| {
        let opened = Arc::new(Gpu::open());
        *shared = Arc::downgrade(&opened);
        if validation() != Validation::GpuAssisted {
            KEPT.get_or_init(|| opened.clone());
        }
        opened
    });
    Checked(gpu)
}

/// Asserts at its end that the validation layer was silent.
pub(crate) struct Checked(Arc<Gpu>);

impl Deref for Checked {
    type Target = Gpu;
    fn deref(&self) -> &Gpu {
        &self.0
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        let instance = self.device.instance();
        let (count, report) = (instance.validation_messages(), instance.validation_report());
        if count > 0 {
            eprintln!("{count} messages of the validation layer:\n{}", report.join("\n"));
        }
        assert!(count == 0 || std::thread::panicking(), "the validation layer has complaints");
    }
}

/// A device with the pipelines made so far.
pub(crate) struct Gpu {
    device: Arc<Device>,
    pipelines: Mutex<HashMap<(String, Vec<u32>), Pipeline>>,
}

impl Gpu {
    fn open() -> Self {
        let options = InstanceOptions { validation: validation() };
        let instance = Arc::new(Instance::new(options).unwrap());
        let devices = instance.devices().unwrap();
        let visible = std::env::var("GGML_VK_VISIBLE_DEVICES").ok();
        let info = &devices[choose(&devices, None, visible.as_deref()).unwrap()];
        let device = Device::open(&instance, info, DeviceOptions::default()).unwrap();
        Self { device, pipelines: Mutex::default() }
    }

    /// Subgroups of a workgroup of this size.
    pub(crate) fn subgroups(&self, workgroup: u32) -> u32 {
        workgroup.div_ceil(self.device.info().subgroup.default)
    }

    /// What the device is.
    pub(crate) fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// A buffer that holds `data`; no data: four bytes, for bindings that nobody reads.
    pub(crate) fn upload<T: bytemuck::Pod>(&self, data: &[T]) -> Buffer {
        let bytes = bytemuck::cast_slice(data);
        let buffer = self.buffer(bytes.len());
        buffer.write(0, bytes).unwrap();
        buffer
    }

    /// As [`Self::upload`], with the padding that weights have.
    pub(crate) fn upload_weights(&self, bytes: &[u8]) -> Buffer {
        let padded: Vec<u8> = bytes.iter().copied().chain([0xff; WEIGHT_PADDING]).collect();
        self.upload(&padded)
    }

    /// A buffer of `n` elements, all bits 0.
    #[allow(dead_code, reason = "for kernels that update in place")]
    pub(crate) fn zeros<T: bytemuck::Pod>(&self, n: usize) -> Buffer {
        self.upload(&vec![T::zeroed(); n])
    }

    /// A buffer of `n` f32 that are all NaN, so that elements never written are noticed.
    pub(crate) fn nans(&self, n: usize) -> Buffer {
        self.upload(&vec![f32::NAN; n])
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        Buffer::new(&self.device, "test", bytes.max(4) as u64, MemoryKind::HostRead).unwrap()
    }

    /// The whole buffer.
    pub(crate) fn read<T: bytemuck::Pod>(&self, buffer: &Buffer) -> Vec<T> {
        let mut data = vec![T::zeroed(); buffer.bytes() as usize / size_of::<T>()];
        buffer.read(0, bytemuck::cast_slice_mut(&mut data)).unwrap();
        data
    }

    /// Runs a kernel once and waits. `spec`: specialization constants from 0, the workgroup size.
    /// Bindings of the module past the end of `buffers` get the first buffer.
    pub(crate) fn run<P: PushConstants>(
        &self,
        name: &str,
        spec: &[u32],
        push: &P,
        buffers: &[&Buffer],
        grid: [u32; 3],
    ) {
        let pipeline = self.pipeline::<P>(name, spec);
        let n_bindings = module(name).unwrap().bindings as usize;
        let absent = std::iter::repeat(&buffers[0]);
        let bindings: Vec<Binding<'_>> =
            buffers.iter().chain(absent).take(n_bindings).map(|&b| b.into()).collect();
        let mut recorder = Recorder::new(&self.device, Lane::Compute, name, Replay::Once).unwrap();
        recorder.barrier();
        let push = bytemuck::bytes_of(push);
        recorder.dispatch(&pipeline, push, &bindings, UVec3::from(grid), UVec3::ZERO);
        recorder.host_barrier();
        let commands = recorder.finish().unwrap();
        let point = self.device.submit(Lane::Compute, &[&commands], &[]).unwrap();
        self.device.wait(point, name).unwrap();
    }

    fn pipeline<P: PushConstants>(&self, name: &str, spec: &[u32]) -> Pipeline {
        assert_eq!(name.split('.').next(), Some(P::SHADER), "push constants of another shader");
        let key = (name.to_owned(), spec.to_vec());
        if let Some(known) = self.pipelines.lock().unwrap().get(&key) {
            return known.clone();
        }
        let module = module(name).unwrap_or_else(|| panic!("no shader module {name}"));
        let full = spec[0].is_multiple_of(self.device.info().subgroup.max);
        let info = PipelineInfo {
            name,
            spirv: &module.spirv,
            n_bindings: module.bindings,
            push_bytes: size_of::<P>() as u32,
            spec,
            subgroups: if full { Subgroups::Full } else { Subgroups::Any },
        };
        let made = Pipeline::new(&self.device, &info).unwrap();
        self.pipelines.lock().unwrap().insert(key, made.clone());
        made
    }
}

/// Sides x and y of a grid over `items`, folded as `grid_item()` of common.glsl unfolds them.
pub(crate) fn fold(items: u32) -> [u32; 2] {
    [items.min(GRID_FOLD), items.div_ceil(GRID_FOLD)]
}
