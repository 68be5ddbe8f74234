//! What a device can do at best, measured: bytes read a second, operations a second with and without
//! matrix units, and the time of a dispatch that does nothing.

use super::grid;
use super::kernels::{KernelKey, Kernels};
use super::stopwatch::{Stopwatch, median};
use crate::error::Result;
use crate::push;
use crate::vk::{Binding, Buffer, Device, DeviceInfo, DeviceKind, Lane, MatrixShape, MemoryKind};
use crate::vk::{Recorder, Replay};
use ash::vk::{ComponentTypeKHR as Component, ScopeKHR as Scope};
use glam::UVec3;
use std::sync::Arc;

/// Samples of a measurement.
const SAMPLES: usize = 5;
/// A measurement takes this long at least, so that starting and ending it count for little.
const ENOUGH_NS: f64 = 2e6;
/// Read on a GPU: a multiple of all caches (H200: 50 MB).
const READ_BYTES: u64 = 1 << 30;
/// Read on a CPU, where a pass takes a tenth of a second.
const CPU_READ_BYTES: u64 = 128 << 20;
/// 16-byte loads of an invocation in `peak_read`.
const LOADS: u32 = 8;
/// Workgroups of the arithmetic kernels: many for the largest GPU.
const WORKGROUPS: u32 = 8192;
/// `CHAINS` of shaders/peak_fma.comp, of four components.
const FMA_CHAINS: u32 = 8;
/// `A_TILES` and `B_TILES` of shaders/peak_matrix.comp.
const MATRIX_TILES: (u32, u32) = (2, 4);
/// Steps of an arithmetic kernel at most: minutes on a slow device are too long.
const MAX_STEPS: u32 = 1 << 16;

/// The best that was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Peaks {
    /// Bytes read from memory, or read and written by copies, per nanosecond (GB/s).
    pub memory_gbps: f64,
    /// f32 operations per nanosecond; a multiplication with an addition is two.
    pub f32_gflops: f64,
    /// f16 products of matrix units, summed in f32, per nanosecond.
    pub matrix: Option<MatrixPeak>,
    /// A dispatch that does nothing, with its barrier, in nanoseconds.
    pub dispatch_ns: f64,
}

/// The fastest shape of the matrix units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatrixPeak {
    /// Operations per nanosecond.
    pub gflops: f64,
    /// m, n, k.
    pub shape: [u32; 3],
}

impl Peaks {
    /// Measures; takes a second at most on a GPU.
    pub fn measure(device: &Arc<Device>) -> Result<Peaks> {
        let mut meter = Meter {
            device: device.clone(),
            kernels: Kernels::new(device.clone()),
            watch: Stopwatch::new(device)?,
        };
        let mut matrix: Option<MatrixPeak> = None;
        for shape in f16_shapes(device.info()) {
            let found = meter.matrix(shape)?;
            if matrix.is_none_or(|best| found.gflops > best.gflops) {
                matrix = Some(found);
            }
        }
        Ok(Peaks {
            memory_gbps: meter.memory()?,
            f32_gflops: meter.fma()?,
            matrix,
            dispatch_ns: meter.dispatch()?,
        })
    }

    /// What matrix products are compared with.
    pub fn product_gflops(&self) -> f64 {
        self.matrix.map_or(self.f32_gflops, |m| m.gflops.max(self.f32_gflops))
    }
}

/// Shapes that multiply f16 into f32 in a subgroup.
pub fn f16_shapes(info: &DeviceInfo) -> Vec<[u32; 3]> {
    let fits = |s: &&MatrixShape| {
        let types = (s.a, s.b, s.c, s.result);
        let (half, single) = (Component::FLOAT16, Component::FLOAT32);
        types == (half, half, single, single) && s.scope == Scope::SUBGROUP
    };
    let usable = info.optional.float16 && info.optional.vulkan_memory_model;
    let shapes = info.matrix_shapes.iter().filter(fits).filter(|_| usable);
    let mut shapes: Vec<_> = shapes.map(|s| [s.m, s.n, s.k]).collect();
    shapes.sort_unstable();
    shapes.dedup();
    shapes
}

struct Meter {
    device: Arc<Device>,
    kernels: Kernels,
    watch: Stopwatch,
}

impl Meter {
    fn is_cpu(&self) -> bool {
        self.device.info().kind == DeviceKind::Cpu
    }

    /// Size of a workgroup: whole subgroups.
    fn local(&self) -> u32 {
        let subgroup = self.device.info().subgroup.default.max(1);
        let most = self.device.info().limits.workgroup_invocations;
        let wanted = if self.is_cpu() { subgroup * 4 } else { 256.max(subgroup) };
        wanted.min(most)
    }

    fn workgroups(&self) -> u32 {
        if self.is_cpu() { 64 } else { WORKGROUPS }
    }

    fn buffer(&self, name: &str, bytes: u64) -> Result<Buffer> {
        Buffer::new(&self.device, name, bytes, MemoryKind::Device)
    }

    /// Bytes per nanosecond. On a CPU copies are faster than kernels.
    fn memory(&mut self) -> Result<f64> {
        let local = self.local();
        let part_bytes = u64::from(local * LOADS) * 16;
        let limits = self.device.info().limits;
        let wanted = if self.is_cpu() { CPU_READ_BYTES } else { READ_BYTES };
        let n_parts = wanted.min(limits.allocated_buffer_bytes()) / part_bytes;
        let data = self.buffer("peak.data", n_parts * part_bytes)?;
        let sums = self.buffer("peak.sums", n_parts * 4)?;
        // Pages that nobody wrote may all be the same one.
        let mut recorder = Recorder::new(&self.device, Lane::Compute, "peak.fill", Replay::Once)?;
        recorder.fill(&data, 0..data.bytes(), 0x3c5a_96f1);
        let point = self.device.submit(Lane::Compute, &[&recorder.finish()?], &[])?;
        self.device.wait(point, "filling memory to be read")?;
        let push = push::PeakRead { data: data.address(), n_parts: n_parts as u32, _pad: 0 };
        let key = KernelKey::new::<push::PeakRead>(&[local, LOADS]);
        let ns = self.sample(&key, &push, &[(&sums).into()], grid::fold(n_parts), Some(&data))?;
        let read = (n_parts * part_bytes) as f64 / ns;
        let half = data.bytes() / 2 / 16 * 16;
        let copy =
            |_| self.watch.time("peak.copy", |recorder| recorder.copy(&data, 0, &data, half, half));
        let copies: Vec<f64> = (0..=SAMPLES).map(copy).collect::<Result<_>>()?;
        Ok(read.max(2.0 * half as f64 / median(copies[1..].to_vec())))
    }

    /// Operations per nanosecond.
    fn fma(&mut self) -> Result<f64> {
        let (local, groups) = (self.local(), self.workgroups());
        let out = self.buffer("peak.out", u64::from(local * groups) * 4)?;
        let key = KernelKey::new::<push::PeakFma>(&[local]);
        // A contraction: values stay what they are about.
        let push = |steps| push::PeakFma { steps, a: 0.999, b: 0.001 };
        let (steps, ns) = self.grow(|meter, steps| {
            let grid = UVec3::new(groups, 1, 1);
            meter.sample(&key, &push(steps), &[(&out).into()], grid, None)
        })?;
        let per_step = f64::from(local * groups) * f64::from(FMA_CHAINS) * 4.0 * 2.0;
        Ok(per_step * f64::from(steps) / ns)
    }

    fn matrix(&mut self, shape: [u32; 3]) -> Result<MatrixPeak> {
        let [m, n, k] = shape;
        let (local, groups) = (self.local(), self.workgroups());
        let subgroups = groups * (local / self.device.info().subgroup.default.max(1));
        let (a_tiles, b_tiles) = MATRIX_TILES;
        let values = pseudo_random_halves((a_tiles * m * k + b_tiles * k * n) as usize);
        let input = self.buffer("peak.in", (values.len() * 2) as u64)?;
        let point = input.upload(0, bytemuck::cast_slice(&values))?;
        self.device.wait(point, "uploading matrices")?;
        let out = self.buffer("peak.out", u64::from(subgroups * m * n) * 4)?;
        let key = KernelKey::new::<push::PeakMatrix>(&[local, m, n, k]);
        let (steps, ns) = self.grow(|meter, steps| {
            let bindings = [(&input).into(), (&out).into()];
            let grid = UVec3::new(groups, 1, 1);
            meter.sample(&key, &push::PeakMatrix { steps }, &bindings, grid, None)
        })?;
        let products = f64::from(subgroups) * f64::from(a_tiles * b_tiles) * f64::from(steps);
        Ok(MatrixPeak { gflops: products * 2.0 * f64::from(m * n * k) / ns, shape })
    }

    /// Nanoseconds of a dispatch that does nothing.
    fn dispatch(&mut self) -> Result<f64> {
        const N: u32 = 200;
        let local = self.local();
        let out = self.buffer("peak.out", u64::from(local) * 4)?;
        let key = KernelKey::new::<push::PeakFma>(&[local]);
        self.kernels.prepare(std::iter::once(&key))?;
        let pipeline = self.kernels.get(&key)?;
        let push = push::PeakFma { steps: 0, a: 0.0, b: 0.0 };
        let samples: Result<Vec<f64>> = (0..SAMPLES)
            .map(|_| {
                self.watch.time("peak.dispatch", |recorder| {
                    for _ in 0..N {
                        let bindings = [Binding::from(&out)];
                        let push = bytemuck::bytes_of(&push);
                        recorder.dispatch(pipeline, push, &bindings, UVec3::ONE, UVec3::ZERO);
                        recorder.barrier();
                    }
                })
            })
            .collect();
        Ok(median(samples?) / f64::from(N))
    }

    /// More steps until a run is long enough; the steps and their time.
    fn grow(&mut self, run: impl Fn(&mut Self, u32) -> Result<f64>) -> Result<(u32, f64)> {
        let mut steps = 16;
        loop {
            let ns = run(self, steps)?;
            if ns >= ENOUGH_NS || steps >= MAX_STEPS {
                return Ok((steps, ns));
            }
            let factor = (1.5 * ENOUGH_NS / ns).ceil().clamp(2.0, 16.0);
            steps = (steps * factor as u32).min(MAX_STEPS);
        }
    }

    /// The middle of some runs' nanoseconds, after one that does not count.
    fn sample<P: push::PushConstants>(
        &mut self,
        key: &KernelKey,
        push: &P,
        bindings: &[Binding<'_>],
        grid: UVec3,
        by_address: Option<&Buffer>,
    ) -> Result<f64> {
        self.kernels.prepare(std::iter::once(key))?;
        let pipeline = self.kernels.get(key)?;
        let run = |_| {
            self.watch.time(&key.module, |recorder| {
                by_address.into_iter().for_each(|buffer| recorder.keep(buffer));
                recorder.dispatch(pipeline, bytemuck::bytes_of(push), bindings, grid, UVec3::ZERO);
            })
        };
        let samples: Vec<f64> = (0..=SAMPLES).map(run).collect::<Result<_>>()?;
        Ok(median(samples[1..].to_vec()))
    }
}

/// Values between -1 and 1 as f16 bits.
fn pseudo_random_halves(n: usize) -> Vec<u16> {
    let value = |i: usize| {
        let bits = (i as u32).wrapping_mul(0x9e37_79b9) >> 24;
        half::f16::from_f32(bits as f32 / 128.0 - 1.0).to_bits()
    };
    (0..n).map(value).collect()
}
