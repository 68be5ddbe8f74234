//! What a model is called in a line: by architecture, size and tensor types, as in llama-bench.

use super::Gguf;
use std::collections::HashMap;

/// `general.file_type` in llama.cpp's words (`llama_model_ftype_name`).
const FILE_TYPES: &[(u32, &str)] = &[
    (0, "all F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K - Medium"),
    (11, "Q3_K - Small"),
    (12, "Q3_K - Medium"),
    (13, "Q3_K - Large"),
    (14, "Q4_K - Small"),
    (15, "Q4_K - Medium"),
    (16, "Q5_K - Small"),
    (17, "Q5_K - Medium"),
    (18, "Q6_K"),
    (21, "Q2_K - Small"),
    (25, "IQ4_NL - 4.5 bpw"),
    (30, "IQ4_XS - 4.25 bpw"),
    (32, "BF16"),
    (38, "MXFP4 MoE"),
];

impl Gguf {
    /// Elements of all tensors.
    pub fn n_params(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum()
    }

    /// `qwen3moe 30B.A3B Q4_K - Medium`. Keys of another type than usual count as absent: they are but
    /// for show.
    pub fn description(&self) -> String {
        let text = |key| self.metadata.str(key).ok().flatten();
        let arch = text("general.architecture").unwrap_or("?");
        let size = text("general.size_label").map(|label| label.replace('-', "."));
        let size = size.unwrap_or_else(|| match self.n_params() {
            n if n < 1_000_000_000 => format!("{:.0}M", n as f64 / 1e6),
            n => format!("{:.0}B", n as f64 / 1e9),
        });
        let file_type = self.metadata.u32("general.file_type").ok().flatten();
        let known = FILE_TYPES.iter().find(|row| Some(row.0) == file_type);
        let types = known.map_or_else(|| self.commonest_type(), |row| row.1.to_owned());
        format!("{arch} {size} {types}")
    }

    /// The type that most bytes have.
    fn commonest_type(&self) -> String {
        let mut bytes: HashMap<&str, u64> = HashMap::new();
        for tensor in &self.tensors {
            *bytes.entry(tensor.ty.name()).or_default() += tensor.bytes;
        }
        let most = bytes.into_iter().max_by_key(|&(name, bytes)| (bytes, name));
        most.map_or_else(|| "?".to_owned(), |(name, _)| name.to_owned())
    }
}
