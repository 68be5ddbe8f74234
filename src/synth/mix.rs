//! Which tensor gets which type: the rules of llama.cpp's quantizer (`llama_tensor_get_type` and
//! `tensor_allows_quantization` in `src/llama-quant.cpp`), without an importance matrix.

use super::presets::{Arch, Shape};
use crate::gguf::GgmlType;
use crate::gguf::write::TensorSpec;

/// A mix of tensor types, named as in file names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as in llama.cpp; the table below says more")]
pub enum Mix {
    Q2K,
    Q3KM,
    Q4_0,
    Q4KS,
    Q4KM,
    Q5KM,
    Q6K,
    Q8_0,
    Iq4Xs,
    Mxfp4,
    F16,
    Bf16,
}

impl Mix {
    /// All, smallest first: `--type`, `general.file_type`, and the type of most tensors.
    const TABLE: &[(Mix, &str, u32, GgmlType)] = &[
        (Mix::Q2K, "q2_k", 10, GgmlType::Q2_K),
        (Mix::Q3KM, "q3_k_m", 12, GgmlType::Q3_K),
        (Mix::Iq4Xs, "iq4_xs", 30, GgmlType::IQ4_XS),
        (Mix::Mxfp4, "mxfp4", 38, GgmlType::MXFP4),
        (Mix::Q4_0, "q4_0", 2, GgmlType::Q4_0),
        (Mix::Q4KS, "q4_k_s", 14, GgmlType::Q4_K),
        (Mix::Q4KM, "q4_k_m", 15, GgmlType::Q4_K),
        (Mix::Q5KM, "q5_k_m", 17, GgmlType::Q5_K),
        (Mix::Q6K, "q6_k", 18, GgmlType::Q6_K),
        (Mix::Q8_0, "q8_0", 7, GgmlType::Q8_0),
        (Mix::F16, "f16", 1, GgmlType::F16),
        (Mix::Bf16, "bf16", 32, GgmlType::BF16),
    ];

    /// Every mix.
    pub fn all() -> impl Iterator<Item = Mix> {
        Self::TABLE.iter().map(|row| row.0)
    }

    /// The mix of a name.
    pub fn find(name: &str) -> Option<Mix> {
        Self::all().find(|mix| mix.name() == name)
    }

    /// `--type`
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// `general.file_type`
    pub fn file_type(self) -> u32 {
        self.row().2
    }

    fn base(self) -> GgmlType {
        self.row().3
    }

    fn row(self) -> &'static (Mix, &'static str, u32, GgmlType) {
        // The table lists every variant, which a test proves.
        Self::TABLE.iter().find(|row| row.0 == self).unwrap_or(&Self::TABLE[0])
    }
}

/// The types of `tensors`, which are in the order of [`super::layout::tensors`].
pub(super) fn types(mix: Mix, shape: &Shape, tensors: &[TensorSpec]) -> Vec<GgmlType> {
    let n_values = tensors.iter().filter(|t| Kind::of(&t.name) == Kind::Value).count() as u32;
    let mut i_value = 0;
    let of = |tensor: &TensorSpec| {
        let kind = Kind::of(&tensor.name);
        if !is_quantized(tensor) {
            return GgmlType::F32;
        }
        if matches!(shape.arch, Arch::GptOss) && tensor.name.contains("_exps.") {
            // Its experts were trained so, and no published file has them otherwise.
            return GgmlType::MXFP4;
        }
        if matches!(mix, Mix::F16 | Mix::Bf16) {
            return mix.base();
        }
        let place = match kind {
            Kind::Value => Place { i: i_value, n: n_values },
            _ => Place { i: layer(&tensor.name), n: shape.n_block() },
        };
        i_value += u32::from(kind == Kind::Value);
        fitting(chosen(mix, shape, tensor, kind, place), tensor.shape[0])
    };
    tensors.iter().map(of).collect()
}

/// What the rules tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Embedding,
    Head,
    /// Values, alone or in one matrix with queries and keys.
    Value,
    Key,
    AttentionOutput,
    FfnDown,
    Other,
}

impl Kind {
    fn of(name: &str) -> Kind {
        let has = |part: &str| name.contains(part);
        match name {
            "output.weight" => Kind::Head,
            "token_embd.weight" => Kind::Embedding,
            _ if has("attn_qkv.weight") || has("attn_v.weight") => Kind::Value,
            _ if has("attn_k.weight") => Kind::Key,
            _ if has("attn_output.weight") => Kind::AttentionOutput,
            _ if has("ffn_down") => Kind::FfnDown,
            _ => Kind::Other,
        }
    }
}

/// A tensor's rank among those of its kind.
#[derive(Clone, Copy)]
struct Place {
    i: u32,
    n: u32,
}

impl Place {
    /// The first and the last eighth, and every third between.
    fn gets_more_bits(self) -> bool {
        let Place { i, n } = self;
        i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
    }

    fn is_in_first(self, part: u32) -> bool {
        self.i < self.n / part
    }
}

/// Norms, biases, routers and small convolutions stay as they are.
fn is_quantized(tensor: &TensorSpec) -> bool {
    let name = &tensor.name;
    let kept = ["_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d"];
    tensor.shape.len() >= 2
        && name.ends_with("weight")
        && !kept.iter().any(|part| name.contains(part))
}

/// The mix's choice for a tensor, whatever its row length.
fn chosen(mix: Mix, shape: &Shape, tensor: &TensorSpec, kind: Kind, place: Place) -> GgmlType {
    use GgmlType as T;
    let base = mix.base();
    let n_gqa = shape.n_head / shape.n_head_kv;
    let eight_experts = shape.n_expert == 8;
    match (kind, mix) {
        (Kind::Head, Mix::Mxfp4 | Mix::Q8_0) => T::Q8_0,
        (Kind::Head, _) if !tensor.shape[0].is_multiple_of(base.block_len()) => T::Q8_0,
        (Kind::Head, _) => T::Q6_K,
        (_, Mix::Mxfp4) if tensor.shape.len() > 2 => T::MXFP4,
        (_, Mix::Mxfp4) => T::Q8_0,
        // Small beside eight large experts.
        (Kind::Value | Kind::Key, _) if eight_experts => T::Q8_0,
        (Kind::Value, Mix::Q2K) if n_gqa >= 4 => T::Q4_K,
        (Kind::Value, Mix::Q2K) => T::Q3_K,
        (Kind::Value, Mix::Q3KM) if place.i < 2 => T::Q5_K,
        (Kind::Value, Mix::Q3KM) => T::Q4_K,
        (Kind::Value, Mix::Iq4Xs) if n_gqa >= 4 => T::Q5_K,
        (Kind::Value, Mix::Q4KM | Mix::Q5KM) if place.gets_more_bits() => T::Q6_K,
        (Kind::Value, Mix::Q4KS) if place.i < 4 => T::Q5_K,
        (Kind::FfnDown, Mix::Q2K) => T::Q3_K,
        (Kind::FfnDown, Mix::Q3KM) if place.is_in_first(16) => T::Q5_K,
        (Kind::FfnDown, Mix::Q3KM) => T::Q4_K,
        (Kind::FfnDown, Mix::Q4KM | Mix::Q5KM) if place.gets_more_bits() => T::Q6_K,
        (Kind::FfnDown, Mix::Iq4Xs | Mix::Q4KS) if place.is_in_first(8) => T::Q5_K,
        (Kind::AttentionOutput, Mix::Q2K | Mix::Q3KM | Mix::Iq4Xs | Mix::Q4KS | Mix::Q4KM)
            if eight_experts =>
        {
            T::Q5_K
        }
        (Kind::AttentionOutput, Mix::Q2K) => T::Q3_K,
        (Kind::AttentionOutput, Mix::Q3KM) => T::Q4_K,
        _ => base,
    }
}

/// The type that takes another's place where rows of `k` elements are not whole blocks of it.
fn fitting(ty: GgmlType, k: u64) -> GgmlType {
    use GgmlType as T;
    if k.is_multiple_of(ty.block_len()) {
        return ty;
    }
    let smaller = match ty {
        T::IQ4_XS => T::IQ4_NL,
        T::Q2_K | T::Q3_K => T::Q4_0,
        T::Q4_K => T::Q5_0,
        T::Q5_K => T::Q5_1,
        T::Q6_K => T::Q8_0,
        _ => T::F16,
    };
    if k.is_multiple_of(smaller.block_len()) { smaller } else { T::F16 }
}

/// The layer in `blk.{il}.…`; 0 without one.
fn layer(name: &str) -> u32 {
    let number = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mix_is_in_the_table() {
        let all = [
            Mix::Q2K,
            Mix::Q3KM,
            Mix::Q4_0,
            Mix::Q4KS,
            Mix::Q4KM,
            Mix::Q5KM,
            Mix::Q6K,
            Mix::Q8_0,
            Mix::Iq4Xs,
            Mix::Mxfp4,
            Mix::F16,
            Mix::Bf16,
        ];
        assert_eq!(Mix::all().count(), all.len());
        for mix in all {
            assert_eq!(Mix::find(mix.name()), Some(mix));
        }
        assert_eq!(Mix::find("q4_k_x"), None);
    }

    /// llama.cpp's `use_more_bits` for 48 layers.
    #[test]
    fn more_bits_go_to_the_ends_and_every_third() {
        let more: Vec<u32> = (0..48).filter(|&i| Place { i, n: 48 }.gets_more_bits()).collect();
        let expected = [
            0, 1, 2, 3, 4, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35, 38, 41, 42, 43, 44, 45, 46, 47,
        ];
        assert_eq!(more, expected);
    }

    #[test]
    fn types_with_long_blocks_give_way_to_shorter_ones() {
        assert_eq!(fitting(GgmlType::Q4_K, 2048), GgmlType::Q4_K);
        assert_eq!(fitting(GgmlType::Q4_K, 2880), GgmlType::Q5_0);
        assert_eq!(fitting(GgmlType::Q6_K, 1408), GgmlType::Q8_0);
        assert_eq!(fitting(GgmlType::Q8_0, 40), GgmlType::F16);
    }
}
