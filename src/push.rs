//! Push constants: one struct per shader. Each is compared with what the compiler made of the shader's
//! own block (names, offsets, types), so that two swapped `u32`s stop the build.
//!
//! Structs are at most 128 bytes, 64-bit members first.

#[allow(missing_docs, reason = "generated")]
mod generated {
    /// A compiled shader module.
    pub(crate) struct Module {
        pub(crate) name: &'static str,
        /// Storage buffers, bound as 0..bindings.
        pub(crate) bindings: u32,
        pub(crate) push_bytes: u32,
        pub(crate) spirv: &'static [u8],
    }
    /// One member of a push-constant block, as the compiler laid it out.
    pub(crate) struct PushField {
        pub(crate) name: &'static str,
        pub(crate) offset: usize,
        pub(crate) ty: &'static str,
    }
    include!(concat!(env!("OUT_DIR"), "/shaders.rs"));
}
use generated::{PushField, layout};

/// One compiled module by its name, `mul_mat_vec.q4_k`.
pub fn module(name: &str) -> Option<ShaderModule> {
    let m = generated::MODULES.iter().find(|m| m.name == name)?;
    let spirv =
        m.spirv.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
    Some(ShaderModule { name: m.name, bindings: m.bindings, push_bytes: m.push_bytes, spirv })
}

/// The names of all compiled modules.
pub fn module_names() -> impl Iterator<Item = &'static str> {
    generated::MODULES.iter().map(|m| m.name)
}

/// A compiled shader module, ready for a pipeline.
pub struct ShaderModule {
    /// `mul_mat_vec.q4_k`
    pub name: &'static str,
    /// Storage buffers, bound as 0..bindings.
    pub bindings: u32,
    /// Size of the push constants.
    pub push_bytes: u32,
    /// The SPIR-V words.
    pub spirv: Vec<u32>,
}

/// The push constants of one shader source.
pub trait PushConstants: bytemuck::Pod {
    /// The source's name without ending: `mul_mat_vec`.
    const SHADER: &'static str;
}

trait PushScalar {
    const NAME: &'static str;
}
impl PushScalar for u32 {
    const NAME: &'static str = "u32";
}
impl PushScalar for i32 {
    const NAME: &'static str = "i32";
}
impl PushScalar for f32 {
    const NAME: &'static str = "f32";
}
impl PushScalar for u64 {
    const NAME: &'static str = "u64";
}

const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

/// Is there exactly this member in the shader's block?
const fn has(layout: &[PushField], name: &str, offset: usize, ty: &str) -> bool {
    let mut i = 0;
    while i < layout.len() {
        let f = &layout[i];
        if same(f.name, name) {
            return f.offset == offset && same(f.ty, ty);
        }
        i += 1;
    }
    false
}

macro_rules! push_constants {
    ($($(#[$doc:meta])* $name:ident = $shader:literal $layout:ident {
        $($(#[$field_doc:meta])* $field:ident: $ty:ty,)*
    })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
        pub struct $name { $($(#[$field_doc])* pub $field: $ty,)* }
        impl PushConstants for $name {
            const SHADER: &'static str = $shader;
        }
        const _: () = {
            $(assert!(
                has(layout::$layout, stringify!($field), std::mem::offset_of!($name, $field),
                    <$ty as PushScalar>::NAME),
                concat!("push constant `", stringify!($field), "` differs from shaders/", $shader, ".comp"),
            );)*
            let members: &[&str] = &[$(stringify!($field)),*];
            assert!(members.len() == layout::$layout.len(),
                concat!("shaders/", $shader, ".comp has another number of push constants"));
            assert!(size_of::<$name>() <= 128, "push constants are limited to 128 bytes");
        };
    )*};
}

push_constants! {
    /// Gated activation, elementwise.
    Glu = "glu" GLU {
        /// Elements in all.
        count: u32,
        /// Elements of a row.
        n: u32,
        /// Slope inside the sigmoid of `swiglu_oai`.
        alpha: f32,
        /// Clamp of `swiglu_oai`.
        limit: f32,
    }
    /// Rows of a weight matrix as f32.
    GetRows = "get_rows" GET_ROWS {
        /// Address of the matrix.
        weights: u64,
        /// Elements of a row.
        n: u32,
        /// Rows wanted.
        n_rows: u32,
        /// Factor of all elements.
        scale: f32,
        /// Rows of the matrix; an id past them gives zeros.
        n_weight_rows: u32,
    }
    /// Matrix product for many rows of x.
    MulMat = "mul_mat" MUL_MAT {
        /// Address of the matrix (dense).
        weights: u64,
        /// Address of `u64[n_expert]`, the experts' matrices (grouped).
        table: u64,
        /// Address of `f32[n]`, or `f32[n_expert][n]`; 0 = none.
        bias: u64,
        /// Elements of a weight row.
        k: u32,
        /// Weight rows.
        n: u32,
        /// Rows of y.
        m: u32,
        /// Grouped: pair q takes row q / x_div of x.
        x_div: u32,
    }
    /// Matrix product for few rows of x.
    MulMatVec = "mul_mat_vec" MUL_MAT_VEC {
        /// Address of the matrix (dense).
        weights: u64,
        /// Of a second one with the same rows of x.
        weights2: u64,
        /// Of a third one.
        weights3: u64,
        /// Address of `u64[n_expert]`, the experts' matrices (grouped).
        table: u64,
        /// Address of `f32[n]`, or `f32[n_expert][n]`; 0 = none.
        bias: u64,
        /// Of the second matrix.
        bias2: u64,
        /// Of the third.
        bias3: u64,
        /// Address of the norm's weight, `f32[k]`, if there is a norm.
        norm: u64,
        /// Elements of a weight row.
        k: u32,
        /// Weight rows.
        n: u32,
        /// Of the second matrix; 0 = there is none.
        n2: u32,
        /// Of the third.
        n3: u32,
        /// Rows of y.
        m: u32,
        /// Grouped: pair q takes row q / x_div of x.
        x_div: u32,
        /// The norm's: added to the mean square.
        eps: f32,
        /// Whether what the norm is of is stored, if it is a sum.
        store_sum: u32,
    }
    /// Matrix product for many rows of x, on matrix units.
    MulMatCm = "mul_mat_cm" MUL_MAT_CM {
        /// Address of the matrix (dense).
        weights: u64,
        /// Address of `u64[n_expert]`, the experts' matrices (grouped).
        table: u64,
        /// The second matrix of a gated activation (dense).
        weights2: u64,
        /// The second matrices of a gated activation (grouped).
        table2: u64,
        /// Address of `f32[n]`, or `f32[n_expert][n]`; `2 n` instead of `n` for a gated activation; 0 = none.
        bias: u64,
        /// Elements of a weight row, a multiple of 32.
        k: u32,
        /// Weight rows; of each matrix of a gated activation.
        n: u32,
        /// Rows of y.
        m: u32,
        /// Grouped: pair q takes row q / x_div of x.
        x_div: u32,
        /// Slope inside the sigmoid of `swiglu_oai`.
        alpha: f32,
        /// Clamp of `swiglu_oai`.
        limit: f32,
    }
    /// Matrix product for many rows of x, by integer dot products.
    MulMatInt8 = "mul_mat_int8" MUL_MAT_INT8 {
        /// Address of the matrix (dense).
        weights: u64,
        /// Address of `u64[n_expert]`, the experts' matrices (grouped).
        table: u64,
        /// Address of `f32[n]`, or `f32[n_expert][n]`; 0 = none.
        bias: u64,
        /// Elements of a weight row, a multiple of 32.
        k: u32,
        /// Weight rows.
        n: u32,
        /// Rows of y.
        m: u32,
        /// Grouped: pair q takes row q / x_div of x.
        x_div: u32,
    }
    /// Rows as bytes with a scale for 32 of them.
    Int8Rows = "int8_rows" INT8_ROWS {
        /// Blocks of 32 values.
        n_blocks: u32,
    }
    /// Rows as f16 with a scale each.
    HalfRows = "half_rows" HALF_ROWS {
        /// Elements of a row, a multiple of 8.
        n: u32,
        /// Rows.
        n_rows: u32,
    }
}

push_constants! {
    /// Gate, up and their activation for few rows of x.
    GateUpVec = "gate_up_vec" GATE_UP_VEC {
        /// Address of the matrix, or of `u64[n_expert]`, the experts' matrices.
        gate: u64,
        /// The same; may be gate's.
        up: u64,
        /// Address of the norm's weight, `f32[k]`, if there is a norm.
        norm: u64,
        /// Elements of a weight row.
        k: u32,
        /// Values of a row of y.
        n: u32,
        /// Rows of y.
        m: u32,
        /// Grouped: pair q takes row q / x_div of x.
        x_div: u32,
        /// Row of its matrix with which up begins.
        up_first: u32,
        /// The norm's: added to the mean square.
        eps: f32,
        /// Slope inside the sigmoid of `swiglu_oai`.
        alpha: f32,
        /// Clamp of `swiglu_oai`.
        limit: f32,
        /// Whether what the norm is of is stored, if it is a sum.
        store_sum: u32,
        /// Unused.
        _pad: u32,
    }
    /// Down projections of each token's experts, and their weighted sum, for few tokens.
    DownCombineVec = "down_combine_vec" DOWN_COMBINE_VEC {
        /// Address of `u64[n_expert]`, the experts' matrices.
        table: u64,
        /// Elements of a weight row.
        k: u32,
        /// Weight rows.
        n: u32,
        /// Experts of a token.
        n_used: u32,
        /// Unused.
        _pad: u32,
    }
}

push_constants! {
    /// RMS norm of rows, with an optional residual sum.
    RmsNorm = "rms_norm" RMS_NORM {
        /// Address of the weight, `f32[n]`; 0 = none.
        weight: u64,
        /// Elements in a row.
        n: u32,
        /// Rows.
        n_rows: u32,
        /// Added to the mean square.
        eps: f32,
        /// Unused.
        _pad: u32,
    }
    /// Rotary position embedding, in place.
    Rope = "rope" ROPE {
        /// Address of the angles, `f32[n_rot / 2]`, radians per position.
        freqs: u64,
        /// Heads of a token.
        n_head: u32,
        /// Dimensions of a head.
        head_dim: u32,
        /// Dimensions that turn.
        n_rot: u32,
        /// The first of them.
        rot_offset: u32,
        /// Tokens.
        n_tokens: u32,
        /// Factor on the turned dimensions (YaRN's).
        mscale: f32,
    }
    /// Stores keys or values in the cache.
    KvStore = "kv_store" KV_STORE {
        /// Heads of a token.
        n_head: u32,
        /// Dimensions of a head.
        head_dim: u32,
        /// Tokens.
        n_tokens: u32,
    }
    /// Attention over the cache.
    FlashAttn = "flash_attn" FLASH_ATTN {
        /// Address of the attention sinks, `f32[n_head]`; 0 = none.
        sinks: u64,
        /// Tokens.
        n_tokens: u32,
        /// Heads of a token.
        n_head: u32,
        /// Heads of a cell; divides `n_head`.
        n_kv_head: u32,
        /// Runs of keys that are handled apart.
        n_splits: u32,
        /// Cells that a token sees, its own included; 0 = all up to its own.
        window: u32,
        /// Factor on q.k.
        scale: f32,
        /// Limit of the scores; 0 = none.
        softcap: f32,
        /// Unused.
        _pad: u32,
    }
    /// Attention over the cache on matrix units.
    FlashAttnCm = "flash_attn_cm" FLASH_ATTN_CM {
        /// Address of the attention sinks, `f32[n_head]`; 0 = none.
        sinks: u64,
        /// Tokens.
        n_tokens: u32,
        /// Heads of a token.
        n_head: u32,
        /// Heads of a cell; divides `n_head`.
        n_kv_head: u32,
        /// Runs of keys that are handled apart.
        n_splits: u32,
        /// Cells that a token sees, its own included; 0 = all up to its own.
        window: u32,
        /// Factor on q.k.
        scale: f32,
        /// Limit of the scores; 0 = none.
        softcap: f32,
        /// Unused.
        _pad: u32,
    }
    /// Joins the splits of `flash_attn`.
    FlashAttnMerge = "flash_attn_merge" FLASH_ATTN_MERGE {
        /// Address of the attention sinks, `f32[n_head]`; 0 = none.
        sinks: u64,
        /// Rows: tokens times heads.
        n_rows: u32,
        /// Heads of a token.
        n_head: u32,
        /// Dimensions of a value.
        head_v: u32,
        /// Splits.
        n_splits: u32,
    }
    /// Attention for few tokens, from the products with q, k and v on.
    FlashDecode = "flash_decode" FLASH_DECODE {
        /// Address of the attention sinks, `f32[n_head]`; 0 = none.
        sinks: u64,
        /// Address of the norm of query heads, `f32[head_k]`; 0 = none.
        q_norm: u64,
        /// The same of key heads.
        k_norm: u64,
        /// Address of the angles, `f32[n_rot / 2]`, radians per position.
        freqs: u64,
        /// Tokens.
        n_tokens: u32,
        /// Heads of a token.
        n_head: u32,
        /// Heads of a cell; divides `n_head`.
        n_kv_head: u32,
        /// Runs of cells that are handled apart, at most 64.
        n_splits: u32,
        /// Cells that a token sees, its own included; 0 = all up to its own.
        window: u32,
        /// Factor on q.k.
        scale: f32,
        /// Limit of the scores; 0 = none.
        softcap: f32,
        /// The norms': added to the mean square.
        eps: f32,
        /// Dimensions that turn.
        n_rot: u32,
        /// The first of them.
        rot_offset: u32,
        /// Factor on the turned dimensions (YaRN's).
        mscale: f32,
        /// Unused.
        _pad: u32,
    }
    /// Chooses each token's experts.
    Router = "router" ROUTER {
        /// Address of what is added to the scores for the choice, `f32[n_expert]`; 0 = nothing.
        bias: u64,
        /// Experts, at most 512.
        n_expert: u32,
        /// Experts of a token.
        n_used: u32,
        /// Tokens.
        n_tokens: u32,
        /// Groups of experts; 0 or 1 = no groups.
        n_group: u32,
        /// Groups that a token may choose from.
        n_group_used: u32,
        /// The layer, reported when a logit is NaN.
        il: u32,
        /// Factor on the weights.
        scale: f32,
        /// Least sum that normalized weights are divided by.
        norm_min: f32,
    }
    /// A norm, the router and the choice of experts, for few tokens.
    RouterVec = "router_vec" ROUTER_VEC {
        /// Address of the router, `[n_expert][k]`.
        matrix: u64,
        /// Address of the norm's weight, `f32[k]`.
        norm: u64,
        /// Address of what is added to the scores for the choice, `f32[n_expert]`; 0 = nothing.
        bias: u64,
        /// Elements of a weight row.
        k: u32,
        /// Tokens.
        n_tokens: u32,
        /// Experts, at most 512.
        n_expert: u32,
        /// Experts of a token.
        n_used: u32,
        /// Groups of experts; 0 or 1 = no groups.
        n_group: u32,
        /// Groups that a token may choose from.
        n_group_used: u32,
        /// The layer, reported when a logit is NaN.
        il: u32,
        /// The norm's: added to the mean square.
        eps: f32,
        /// Factor on the weights.
        scale: f32,
        /// Least sum that normalized weights are divided by.
        norm_min: f32,
    }
    /// Counts the pairs of each expert.
    ExpertCount = "expert_count" EXPERT_COUNT {
        /// Pairs (token, slot).
        n_pairs: u32,
        /// Experts.
        n_expert: u32,
    }
    /// Sorts the pairs by expert.
    ExpertSort = "expert_sort" EXPERT_SORT {
        /// Pairs (token, slot).
        n_pairs: u32,
        /// Experts.
        n_expert: u32,
        /// Pairs of a tile, at most.
        tile: u32,
        /// Tiles that the list has room for.
        n_tiles_max: u32,
    }
    /// Weighted sum of each token's experts.
    MoeCombine = "moe_combine" MOE_COMBINE {
        /// Elements in a row.
        n: u32,
        /// Tokens.
        n_tokens: u32,
        /// Experts of a token.
        n_used: u32,
    }
    /// Chosen experts from host memory to staging slots.
    FetchExperts = "fetch_experts" FETCH_EXPERTS {
        /// Address of the first tensor's addresses of experts.
        tables: u64,
        /// Likewise, of the second tensor.
        tables2: u64,
        /// Likewise, of the third.
        tables3: u64,
        /// Address of those in host memory.
        hosts: u64,
        /// Likewise, of the second tensor.
        hosts2: u64,
        /// Likewise, of the third.
        hosts3: u64,
        /// Address of those in a slot.
        slots: u64,
        /// Likewise, of the second tensor.
        slots2: u64,
        /// Likewise, of the third.
        slots3: u64,
        /// Address of what is written: those of chosen experts, for the kernels after it.
        found: u64,
        /// Likewise, of the second tensor.
        found2: u64,
        /// Likewise, of the third.
        found3: u64,
        /// Bytes of a matrix of the first tensor.
        bytes: u32,
        /// Of the second.
        bytes2: u32,
        /// Of the third.
        bytes3: u32,
        /// Pairs of token and slot.
        n_pairs: u32,
        /// Pairs of a token.
        n_used: u32,
        /// Unused.
        _pad: u32,
    }
    /// The largest logits of each row.
    TopLogits = "top_logits" TOP_LOGITS {
        /// Logits in a row.
        n: u32,
        /// Rows.
        n_rows: u32,
        /// Workgroups of a row.
        n_parts: u32,
        /// Places, at most 64.
        k: u32,
    }
    /// How fast memory is read.
    PeakRead = "peak_read" PEAK_READ {
        /// Address of what is read.
        data: u64,
        /// Parts, one for each workgroup.
        n_parts: u32,
        /// Unused.
        _pad: u32,
    }
    /// How fast f32 are multiplied and added.
    PeakFma = "peak_fma" PEAK_FMA {
        /// Steps of each chain.
        steps: u32,
        /// Factor.
        a: f32,
        /// Summand.
        b: f32,
    }
    /// How fast matrix units multiply f16.
    PeakMatrix = "peak_matrix" PEAK_MATRIX {
        /// Products of each accumulator.
        steps: u32,
    }
}
