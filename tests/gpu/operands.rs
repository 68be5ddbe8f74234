//! Random operands of a matrix product on the device, and what the product must be.

use crate::harness::Gpu;
use crate::reference::mul_mat::{Sum, mul_mat_row};
use crate::reference::quants::Quant;
use crate::reference::random::Random;
use crate::reference::rows::rms_norm;
use vkmoe::exec::mat_vec::Activations;
use vkmoe::vk::Buffer;

/// A product: n weight rows of k elements, m rows of x (or pairs).
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) q: Quant,
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) m: usize,
    pub(crate) bias: bool,
}

/// What a kernel gets, and what it must answer.
pub(crate) struct Operands {
    /// Address of the matrix; 0 if there are experts.
    pub(crate) weights: u64,
    /// Address of the experts' addresses; 0 without experts.
    pub(crate) table: u64,
    /// The experts' addresses.
    pub(crate) addresses: Vec<u64>,
    /// Address, or 0.
    pub(crate) bias: u64,
    pub(crate) x: Vec<f32>,
    /// Expert of each pair; none without experts.
    pub(crate) ids: Vec<u32>,
    pub(crate) expected: Vec<Sum>,
    /// Owners of the addresses.
    _buffers: Vec<Buffer>,
}

impl Operands {
    /// One matrix.
    pub(crate) fn dense(gpu: &Gpu, shape: Shape) -> Self {
        Self::dense_of(gpu, shape, &|_| {})
    }

    /// One matrix, whose rows of x `change` has had.
    pub(crate) fn dense_of(gpu: &Gpu, shape: Shape, change: &dyn Fn(&mut [f32])) -> Self {
        let Shape { q, k, n, m, .. } = shape;
        let random = &mut Random(k as u64);
        let w = q.random(random, k * n);
        let mut x = random.units(k * m);
        change(&mut x);
        let bias = if shape.bias { random.units(n) } else { Vec::new() };
        let (weights, bias_buffer) = (gpu.upload_weights(&w), gpu.upload(&bias));
        let w = q.dequantize(&w);
        Operands {
            weights: weights.address(),
            table: 0,
            addresses: Vec::new(),
            bias: if shape.bias { bias_buffer.address() } else { 0 },
            expected: x.chunks_exact(k).flat_map(|x| mul_mat_row(&w, x, &bias)).collect(),
            ids: Vec::new(),
            x,
            _buffers: vec![weights, bias_buffer],
        }
    }

    /// A matrix for each expert, in buffers of their own; pair q takes row q / x_div of x.
    pub(crate) fn grouped(gpu: &Gpu, shape: Shape, n_expert: usize, x_div: usize) -> Self {
        Self::grouped_of(gpu, shape, n_expert, x_div, &|_| {})
    }

    /// The same with rows of x that `change` has had.
    pub(crate) fn grouped_of(
        gpu: &Gpu,
        shape: Shape,
        n_expert: usize,
        x_div: usize,
        change: &dyn Fn(&mut [f32]),
    ) -> Self {
        let Shape { q, k, n, m, .. } = shape;
        let random = &mut Random(k as u64);
        let experts: Vec<Vec<u8>> = (0..n_expert).map(|_| q.random(random, k * n)).collect();
        let mut x = random.units(k * m.div_ceil(x_div));
        change(&mut x);
        let bias = if shape.bias { random.units(n * n_expert) } else { Vec::new() };
        let ids: Vec<u32> = (0..m).map(|_| random.below(n_expert as u32)).collect();

        let mut buffers: Vec<Buffer> = experts.iter().map(|w| gpu.upload_weights(w)).collect();
        let addresses: Vec<u64> = buffers.iter().map(Buffer::address).collect();
        let (table, bias_buffer) = (gpu.upload(&addresses), gpu.upload(&bias));
        buffers.extend([table.clone(), bias_buffer.clone()]);

        let w: Vec<Vec<f32>> = experts.iter().map(|w| q.dequantize(w)).collect();
        let pair = |(pair, &e): (usize, &u32)| {
            let x = &x[pair / x_div * k..][..k];
            let bias = bias.chunks_exact(n).nth(e as usize).unwrap_or_default();
            mul_mat_row(&w[e as usize], x, bias)
        };
        Operands {
            weights: 0,
            table: table.address(),
            addresses,
            bias: if shape.bias { bias_buffer.address() } else { 0 },
            expected: ids.iter().enumerate().flat_map(pair).collect(),
            ids,
            x,
            _buffers: buffers,
        }
    }
}

/// Rows before a norm that a kernel folds into its product.
pub(crate) struct NormRows {
    pub(crate) x: Vec<f32>,
    pub(crate) delta: Vec<f32>,
    /// Weight of the norm.
    pub(crate) weight: Vec<f32>,
    /// What the norm is of.
    pub(crate) sum: Vec<f32>,
    pub(crate) normed: Vec<f32>,
}

impl NormRows {
    pub(crate) const EPS: f32 = 1e-6;

    /// `norm`: NORM of shaders/include/staged_norm.glsl.
    pub(crate) fn new(norm: u32, k: usize, m: usize) -> Self {
        let random = &mut Random(k as u64 + u64::from(norm));
        let (x, delta) = (random.units(k * m), random.units(k * m));
        let weight = random.units(k);
        let sum: Vec<f32> = match norm {
            2 => x.iter().zip(&delta).map(|(x, d)| x + d).collect(),
            _ => x.clone(),
        };
        let rows = sum.chunks_exact(k).flat_map(|row| rms_norm(row, Some(&weight), Self::EPS));
        let normed = rows.map(|v| v as f32).collect();
        NormRows { x, delta, weight, sum, normed }
    }
}

/// The modules of a shader for few rows and weights of a type, and how near they come, as a share of the sum of
/// magnitudes. Integers of 16 bits are off by half a scale: by 1 / 65024 of the largest of eight elements.
pub(crate) fn few_rows_modules(gpu: &Gpu, shader: &str, q: Quant) -> Vec<(String, f64)> {
    let modules = Activations::of(gpu.info()).iter().filter_map(|activations| match activations {
        Activations::F32 => Some((format!("{shader}.{}", q.name), 1e-5)),
        Activations::Int16 => (q.block > 1).then(|| (format!("{shader}.int16.{}", q.name), 4e-5)),
    });
    modules.collect()
}

/// Runs twice; both must give the same bits.
pub(crate) fn twice(name: &str, run: impl Fn() -> Vec<f32>) -> Vec<f32> {
    let (first, second) = (run(), run());
    let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&first), bits(&second), "{name}: another result the second time");
    first
}
