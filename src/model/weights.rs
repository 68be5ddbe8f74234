//! The weights that a model needs, looked up in the file with their shapes checked.

use crate::error::Result;
use crate::gguf::{GgmlType, Gguf, TensorInfo};
use crate::graph::{Weight, WeightId};

/// What a weight is for; decides where it may live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A matrix that every token multiplies with, or the embedding.
    Dense,
    /// All experts of one matrix of a layer.
    Experts,
    /// A vector: norms, biases.
    Vector,
}

/// One weight of the model.
#[derive(Clone, Debug)]
pub struct WeightInfo {
    /// The tensor's name.
    pub name: String,
    /// Index into [`Gguf::tensors`].
    pub tensor: usize,
    /// What for.
    pub role: Role,
    /// Layer, by the name `blk.{il}.…`.
    pub layer: Option<u32>,
    /// Type and shape.
    pub weight: Weight,
    /// Bytes of one expert's matrix, or of the whole weight if there are no experts.
    pub matrix_bytes: u64,
}

impl WeightInfo {
    /// Bytes of the weight.
    pub fn bytes(&self) -> u64 {
        self.matrix_bytes * u64::from(self.weight.n_expert)
    }

    /// `blk.3.ffn_gate_exps.weight`: `ffn_gate_exps`
    pub fn name_in_layer(&self) -> &str {
        let name = self.name.strip_suffix(".weight").unwrap_or(&self.name);
        let without_layer = || -> Option<&str> {
            self.layer?;
            Some(name.strip_prefix("blk.")?.split_once('.')?.1)
        };
        without_layer().unwrap_or(name)
    }
}

/// Tensor types that the kernels read. One shader include each, under `shaders/quant`.
pub const SUPPORTED_TYPES: &[GgmlType] = &[
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::BF16,
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q2_K,
    GgmlType::Q3_K,
    GgmlType::Q4_K,
    GgmlType::Q5_K,
    GgmlType::Q6_K,
    GgmlType::IQ4_NL,
    GgmlType::IQ4_XS,
    GgmlType::MXFP4,
];

/// Looks weights up by name and collects them.
pub struct WeightLoader<'a> {
    gguf: &'a Gguf,
    arch: String,
    weights: Vec<WeightInfo>,
}

impl<'a> WeightLoader<'a> {
    /// For one file. `arch` is the prefix of the architecture's keys.
    pub fn new(gguf: &'a Gguf, arch: &str) -> Self {
        WeightLoader { gguf, arch: arch.to_string(), weights: Vec::new() }
    }

    /// The file.
    pub fn gguf(&self) -> &'a Gguf {
        self.gguf
    }

    /// `{arch}.{name}`
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    /// A required matrix `[n][k]`.
    pub fn matrix(&mut self, name: &str, k: u32, n: u32) -> Result<Weight> {
        self.require(name)?;
        self.add(name, Role::Dense, [k, n, 1])
    }

    /// A matrix that may be absent.
    pub fn optional_matrix(&mut self, name: &str, k: u32, n: u32) -> Result<Option<Weight>> {
        match self.gguf.tensor(name) {
            Some(_) => self.add(name, Role::Dense, [k, n, 1]).map(Some),
            None => Ok(None),
        }
    }

    /// One matrix `[n][k]` per expert.
    pub fn experts(&mut self, name: &str, k: u32, n: u32, n_expert: u32) -> Result<Weight> {
        self.require(name)?;
        self.add(name, Role::Experts, [k, n, n_expert])
    }

    /// A required F32 vector.
    pub fn vector(&mut self, name: &str, n: u32) -> Result<WeightId> {
        let ty = self.require(name)?.ty;
        if ty != GgmlType::F32 {
            return Err(self.tensor_error(name, format!("has type {ty}, F32 is needed")));
        }
        Ok(self.add(name, Role::Vector, [n, 1, 1])?.id)
    }

    /// An F32 vector that may be absent.
    pub fn optional_vector(&mut self, name: &str, n: u32) -> Result<Option<WeightId>> {
        match self.gguf.tensor(name) {
            Some(_) => self.vector(name, n).map(Some),
            None => Ok(None),
        }
    }

    /// All weights looked up.
    pub fn finish(self) -> Vec<WeightInfo> {
        self.weights
    }

    fn require(&self, name: &str) -> Result<&'a TensorInfo> {
        self.gguf.require(name)
    }

    fn tensor_error(&self, name: &str, problem: String) -> crate::Error {
        self.gguf.error(format!("tensor `{name}`"), problem)
    }

    /// Checks type and shape and takes the weight in.
    fn add(&mut self, name: &str, role: Role, ne: [u32; 3]) -> Result<Weight> {
        let tensor = self.gguf.tensors().iter().position(|t| t.name == name);
        let tensor = tensor.ok_or_else(|| self.tensor_error(name, "is missing".into()))?;
        let info = &self.gguf.tensors()[tensor];
        let wanted = [u64::from(ne[0]), u64::from(ne[1]), u64::from(ne[2]), 1];
        if info.shape != wanted {
            let problem = format!("has shape {:?}, {:?} is needed", info.shape, wanted);
            return Err(self.tensor_error(name, problem));
        }
        if !SUPPORTED_TYPES.contains(&info.ty) {
            let known: Vec<&str> = SUPPORTED_TYPES.iter().map(|t| t.name()).collect();
            let problem =
                format!("type {} is not supported; supported: {}", info.ty, known.join(", "));
            return Err(self.tensor_error(name, problem));
        }
        let id = WeightId(self.weights.len() as u32);
        let weight = Weight { id, ty: info.ty, k: ne[0], n: ne[1], n_expert: ne[2] };
        let matrix_bytes = info.bytes / u64::from(ne[2]);
        let layer = name.strip_prefix("blk.").and_then(|n| n.split('.').next()?.parse().ok());
        let name = name.to_string();
        self.weights.push(WeightInfo { name, tensor, role, layer, weight, matrix_bytes });
        Ok(weight)
    }
}
