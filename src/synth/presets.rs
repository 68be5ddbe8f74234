//! The models that can be imitated. A model is here only if its tensors and keys are known from
//! llama.cpp's source and its size agrees with the published file's (`tests/synth.rs`).

use super::mix::Mix;

/// A model.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// `--preset`
    pub name: &'static str,
    /// `general.name`
    pub title: &'static str,
    /// `general.size_label`
    pub size: &'static str,
    /// Dimensions.
    pub shape: Shape,
    /// Without `--type`: how people usually download it.
    pub mix: Mix,
}

/// The dimensions of a model.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Architecture, and what only it has.
    pub arch: Arch,
    /// Layers that a token passes.
    pub n_layer: u32,
    /// Width of the residual stream.
    pub n_embd: u32,
    /// Tokens of the vocabulary.
    pub n_vocab: u32,
    /// Trained context, in tokens.
    pub n_ctx: u32,
    /// Query heads.
    pub n_head: u32,
    /// KV heads.
    pub n_head_kv: u32,
    /// Size of a head.
    pub head: u32,
    /// `feed_forward_length`: width of dense layers, stated even where there are none.
    pub n_ff: u32,
    /// Experts of a layer.
    pub n_expert: u32,
    /// Experts that a token uses.
    pub n_used: u32,
    /// Width of an expert.
    pub n_ff_exp: u32,
    /// Base of the rotary embedding.
    pub rope_base: f32,
    /// Epsilon of the norms.
    pub norm_eps: f32,
}

/// An architecture of llama.cpp.
#[derive(Clone, Copy, Debug)]
pub enum Arch {
    /// `qwen3moe`
    Qwen3Moe,
    /// `llama` with experts: Mixtral.
    Mixtral,
    /// `gpt-oss`
    GptOss,
    /// `glm4moe`: a dense first layer, a shared expert, and a layer that predicts the token after next.
    Glm4Moe,
    /// `qwen3next`: three of four layers have linear attention.
    Qwen3Next(DeltaNet),
    /// `qwen35moe`: likewise, with other tensors.
    Qwen35Moe(DeltaNet),
}

/// Linear attention: a gated delta net.
#[derive(Clone, Copy, Debug)]
pub struct DeltaNet {
    /// Key heads.
    pub n_head_k: u32,
    /// Value heads.
    pub n_head_v: u32,
    /// Size of a head of either kind.
    pub head: u32,
    /// Taps of the convolution.
    pub kernel: u32,
    /// Every so many layers, one has full attention.
    pub interval: u32,
    /// Dimensions that full attention rotates.
    pub n_rot: u32,
    /// Width of the shared expert.
    pub n_ff_shexp: u32,
}

impl Arch {
    /// `general.architecture`
    pub fn name(&self) -> &'static str {
        match self {
            Arch::Qwen3Moe => "qwen3moe",
            Arch::Mixtral => "llama",
            Arch::GptOss => "gpt-oss",
            Arch::Glm4Moe => "glm4moe",
            Arch::Qwen3Next(_) => "qwen3next",
            Arch::Qwen35Moe(_) => "qwen35moe",
        }
    }
}

impl Shape {
    /// Blocks in the file: the layers, and those that predict further tokens.
    pub fn n_block(&self) -> u32 {
        self.n_layer + u32::from(matches!(self.arch, Arch::Glm4Moe))
    }

    /// Rows of the query matrix without gates.
    pub fn n_q(&self) -> u32 {
        self.n_head * self.head
    }

    /// Rows of the key and of the value matrix.
    pub fn n_kv(&self) -> u32 {
        self.n_head_kv * self.head
    }
}

/// The preset of a name.
pub fn find(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

const QWEN3_30B: Shape = Shape {
    arch: Arch::Qwen3Moe,
    n_layer: 48,
    n_embd: 2048,
    n_vocab: 151_936,
    n_ctx: 40_960,
    n_head: 32,
    n_head_kv: 4,
    head: 128,
    n_ff: 6144,
    n_expert: 128,
    n_used: 8,
    n_ff_exp: 768,
    rope_base: 1e6,
    norm_eps: 1e-6,
};

const GPT_OSS_20B: Shape = Shape {
    arch: Arch::GptOss,
    n_layer: 24,
    n_embd: 2880,
    n_vocab: 201_088,
    n_ctx: 131_072,
    n_head: 64,
    n_head_kv: 8,
    head: 64,
    n_ff: 2880,
    n_expert: 32,
    n_used: 4,
    n_ff_exp: 2880,
    rope_base: 150_000.0,
    norm_eps: 1e-5,
};

const DELTA_NET: DeltaNet = DeltaNet {
    n_head_k: 16,
    n_head_v: 32,
    head: 128,
    kernel: 4,
    interval: 4,
    n_rot: 64,
    n_ff_shexp: 512,
};

const QWEN35_35B: Shape = Shape {
    arch: Arch::Qwen35Moe(DELTA_NET),
    n_layer: 40,
    n_embd: 2048,
    n_vocab: 248_320,
    n_ctx: 262_144,
    n_head: 16,
    n_head_kv: 2,
    head: 256,
    n_ff: 0,
    n_expert: 256,
    n_used: 8,
    n_ff_exp: 512,
    rope_base: 1e7,
    norm_eps: 1e-6,
};

/// All presets, the engine's own architectures first.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "qwen3-30b-a3b",
        title: "Qwen3 30B A3B",
        size: "30B-A3B",
        shape: QWEN3_30B,
        mix: Mix::Q4KM,
    },
    Preset {
        name: "qwen3-coder-30b-a3b",
        title: "Qwen3 Coder 30B A3B",
        size: "30B-A3B",
        shape: Shape { n_ctx: 262_144, n_ff: 5472, rope_base: 1e7, ..QWEN3_30B },
        mix: Mix::Q4KM,
    },
    Preset {
        name: "qwen3-235b-a22b",
        title: "Qwen3 235B A22B",
        size: "235B-A22B",
        shape: Shape {
            n_layer: 94,
            n_embd: 4096,
            n_head: 64,
            n_ff: 12_288,
            n_ff_exp: 1536,
            ..QWEN3_30B
        },
        mix: Mix::Q4KM,
    },
    Preset {
        name: "gpt-oss-20b",
        title: "gpt-oss 20B",
        size: "20B",
        shape: GPT_OSS_20B,
        mix: Mix::Mxfp4,
    },
    Preset {
        name: "gpt-oss-120b",
        title: "gpt-oss 120B",
        size: "120B",
        shape: Shape { n_layer: 36, n_expert: 128, ..GPT_OSS_20B },
        mix: Mix::Mxfp4,
    },
    Preset {
        name: "qwen3.6-35b-a3b",
        title: "Qwen3.6 35B A3B",
        size: "35B-A3B",
        shape: QWEN35_35B,
        mix: Mix::Q4KM,
    },
    Preset {
        name: "qwen3-next-80b-a3b",
        title: "Qwen3 Next 80B A3B",
        size: "80B-A3B",
        shape: Shape {
            arch: Arch::Qwen3Next(DELTA_NET),
            n_layer: 48,
            n_vocab: 151_936,
            n_ff: 5120,
            n_expert: 512,
            n_used: 10,
            ..QWEN35_35B
        },
        mix: Mix::Q4KM,
    },
    Preset {
        name: "glm-4.5-air",
        title: "GLM 4.5 Air",
        size: "106B-A12B",
        shape: Shape {
            arch: Arch::Glm4Moe,
            n_layer: 46,
            n_embd: 4096,
            n_vocab: 151_552,
            n_ctx: 131_072,
            n_head: 96,
            n_head_kv: 8,
            head: 128,
            n_ff: 10_944,
            n_expert: 128,
            n_used: 8,
            n_ff_exp: 1408,
            rope_base: 1e6,
            norm_eps: 1e-5,
        },
        mix: Mix::Q4KM,
    },
    Preset {
        name: "mixtral-8x7b",
        title: "Mixtral 8x7B",
        size: "8x7B",
        shape: Shape {
            arch: Arch::Mixtral,
            n_layer: 32,
            n_embd: 4096,
            n_vocab: 32_000,
            n_ctx: 32_768,
            n_head: 32,
            n_head_kv: 8,
            head: 128,
            n_ff: 14_336,
            n_expert: 8,
            n_used: 2,
            n_ff_exp: 14_336,
            rope_base: 1e6,
            norm_eps: 1e-5,
        },
        mix: Mix::Q4KM,
    },
    // Nobody's model: small enough for tests and for a first try.
    Preset {
        name: "tiny",
        title: "Tiny",
        size: "tiny",
        shape: Shape {
            n_layer: 4,
            n_embd: 256,
            n_vocab: 512,
            n_ctx: 4096,
            n_head: 4,
            n_head_kv: 2,
            head: 64,
            n_ff: 512,
            n_expert: 16,
            n_used: 4,
            n_ff_exp: 256,
            ..QWEN3_30B
        },
        mix: Mix::Q4KM,
    },
];
