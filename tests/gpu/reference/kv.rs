//! The KV cache's types on the CPU, as ggml's reference functions have them.

use half::f16;

const BLOCK: usize = 32;

/// Type of a cache; the discriminant is the kernels' specialization constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvType {
    F32 = 0,
    F16 = 1,
    Q8_0 = 2,
    Q4_0 = 3,
}

pub(crate) const ALL: [KvType; 4] = [KvType::F32, KvType::F16, KvType::Q8_0, KvType::Q4_0];

impl KvType {
    pub(crate) fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => head_dim * 4,
            Self::F16 => head_dim * 2,
            Self::Q8_0 => head_dim.div_ceil(BLOCK) * 34,
            Self::Q4_0 => head_dim.div_ceil(BLOCK) * 18,
        }
    }

    /// One head, padded with zeros to whole blocks where the type has blocks.
    pub(crate) fn encode(self, head: &[f32]) -> Vec<u8> {
        let blocks = head.chunks(BLOCK).map(|chunk| {
            let mut block = [0.0; BLOCK];
            block[..chunk.len()].copy_from_slice(chunk);
            block
        });
        match self {
            Self::F32 => bytemuck::cast_slice(head).to_vec(),
            Self::F16 => head.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            Self::Q8_0 => blocks.flat_map(q8_0).collect(),
            Self::Q4_0 => blocks.flat_map(q4_0).collect(),
        }
    }

    /// Rows one behind the other.
    pub(crate) fn decode_rows(self, rows: &[u8], head_dim: usize) -> Vec<f32> {
        rows.chunks_exact(self.row_bytes(head_dim))
            .flat_map(|row| self.decode(row, head_dim))
            .collect()
    }

    pub(crate) fn decode(self, row: &[u8], head_dim: usize) -> Vec<f32> {
        let half = |at: usize| f16::from_le_bytes([row[at], row[at + 1]]).to_f32();
        let value = |i: usize| match self {
            Self::F32 => {
                f32::from_le_bytes([row[4 * i], row[4 * i + 1], row[4 * i + 2], row[4 * i + 3]])
            }
            Self::F16 => half(2 * i),
            Self::Q8_0 => {
                let at = i / BLOCK * 34;
                half(at) * f32::from(row[at + 2 + i % BLOCK] as i8)
            }
            Self::Q4_0 => {
                let at = i / BLOCK * 18;
                let byte = row[at + 2 + i % 16];
                let q = if i % BLOCK < 16 { byte & 15 } else { byte >> 4 };
                half(at) * (f32::from(q) - 8.0)
            }
        };
        (0..head_dim).map(value).collect()
    }
}

/// quantize_row_q8_0_ref of ggml-quants.c.
fn q8_0(block: [f32; BLOCK]) -> Vec<u8> {
    let most = block.iter().fold(0f32, |m, v| m.max(v.abs()));
    let d = most / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let values = block.iter().map(|v| (v * inverse).round() as i8 as u8);
    f16::from_f32(d).to_le_bytes().into_iter().chain(values).collect()
}

/// quantize_row_q4_0_ref of ggml-quants.c.
fn q4_0(block: [f32; BLOCK]) -> Vec<u8> {
    let most = block.iter().fold(0f32, |m, &v| if m.abs() < v.abs() { v } else { m });
    let d = most / -8.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let int4 = |v: f32| ((v * inverse + 8.5) as i8).min(15) as u8;
    let values = (0..16).map(|i| int4(block[i]) | int4(block[i + 16]) << 4);
    f16::from_f32(d).to_le_bytes().into_iter().chain(values).collect()
}
