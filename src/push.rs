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
    let spirv = m.spirv.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
    Some(ShaderModule { name: m.name, bindings: m.bindings, spirv })
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
        /// Address of u64[n_expert], the experts' matrices (grouped).
        table: u64,
        /// Address of f32[n], or f32[n_expert][n]; 0 = none.
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
        /// Address of u64[n_expert], the experts' matrices (grouped).
        table: u64,
        /// Address of f32[n], or f32[n_expert][n]; 0 = none.
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
}
