//! The one table of ggml's tensor types: number in the file, block length, block size.
//!
//! A row of a tensor is a run of blocks; a block holds `block_len` elements in `block_bytes` bytes.
//! Being in this table says that a tensor of the type can be named and measured, not that a kernel
//! computes with it. Source: `enum ggml_type` and `ggml-common.h` of llama.cpp. The numbers missing
//! here (4, 5, 31–33, 36–38) belong to types that llama.cpp has removed.

use std::fmt;

macro_rules! ggml_types {
    ($($variant:ident = $id:literal, $len:literal, $bytes:literal;)*) => {
        /// A tensor's element type. `Display` and [`name`](Self::name) give ggml's name: `Q4_K`.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u32)]
        #[allow(non_camel_case_types, reason = "ggml's own names: users meet them in file names")]
        #[allow(missing_docs, reason = "the table below documents each in numbers")]
        pub enum GgmlType { $($variant = $id,)* }

        impl GgmlType {
            /// Every type, ascending by number.
            pub const ALL: &[GgmlType] = &[$(GgmlType::$variant,)*];

            /// The type with this number in a GGUF file.
            pub fn from_id(id: u32) -> Option<Self> {
                match id { $($id => Some(GgmlType::$variant),)* _ => None }
            }

            /// ggml's name.
            pub fn name(self) -> &'static str {
                match self { $(GgmlType::$variant => stringify!($variant),)* }
            }

            /// `(elements, bytes)` of one block.
            const fn block(self) -> (u64, u64) {
                match self { $(GgmlType::$variant => ($len, $bytes),)* }
            }
        }
    };
}

ggml_types! {
    // name = number, elements a block, bytes a block
    F32     =  0,   1,   4;
    F16     =  1,   1,   2;
    Q4_0    =  2,  32,  18;
    Q4_1    =  3,  32,  20;
    Q5_0    =  6,  32,  22;
    Q5_1    =  7,  32,  24;
    Q8_0    =  8,  32,  34;
    Q8_1    =  9,  32,  36;
    Q2_K    = 10, 256,  84;
    Q3_K    = 11, 256, 110;
    Q4_K    = 12, 256, 144;
    Q5_K    = 13, 256, 176;
    Q6_K    = 14, 256, 210;
    Q8_K    = 15, 256, 292;
    IQ2_XXS = 16, 256,  66;
    IQ2_XS  = 17, 256,  74;
    IQ3_XXS = 18, 256,  98;
    IQ1_S   = 19, 256,  50;
    IQ4_NL  = 20,  32,  18;
    IQ3_S   = 21, 256, 110;
    IQ2_S   = 22, 256,  82;
    IQ4_XS  = 23, 256, 136;
    I8      = 24,   1,   1;
    I16     = 25,   1,   2;
    I32     = 26,   1,   4;
    I64     = 27,   1,   8;
    F64     = 28,   1,   8;
    IQ1_M   = 29, 256,  56;
    BF16    = 30,   1,   2;
    TQ1_0   = 34, 256,  54;
    TQ2_0   = 35, 256,  66;
    MXFP4   = 39,  32,  17;
    NVFP4   = 40,  64,  36;
    Q1_0    = 41, 128,  18;
    Q2_0    = 42,  64,  18;
}

impl GgmlType {
    /// The number that stands for the type in a GGUF file.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Elements in a block; 1 for plain numbers.
    pub fn block_len(self) -> u64 {
        self.block().0
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> u64 {
        self.block().1
    }

    /// Bytes of a row of `n` elements; `None` if `n` is not whole blocks, or the bytes overflow.
    pub fn row_bytes(self, n: u64) -> Option<u64> {
        let (block_len, block_bytes) = self.block();
        if !n.is_multiple_of(block_len) {
            return None;
        }
        (n / block_len).checked_mul(block_bytes)
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::GgmlType;

    #[test]
    fn numbers_and_names_lead_back() {
        for &ty in GgmlType::ALL {
            assert_eq!(GgmlType::from_id(ty.id()), Some(ty));
            assert_eq!(ty.to_string(), ty.name());
        }
        assert!(GgmlType::ALL.is_sorted_by_key(|ty| ty.id()));
        assert_eq!(GgmlType::from_id(4), None);
        assert_eq!(GgmlType::from_id(u32::MAX), None);
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(GgmlType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(GgmlType::Q4_K.row_bytes(500), None);
        assert_eq!(GgmlType::F32.row_bytes(0), Some(0));
        assert_eq!(GgmlType::F32.row_bytes(u64::MAX), None);
    }
}
