//! What a model is: hyper-parameters, the weights it needs, and its layers as blocks.
//!
//! Reading order: [`hparams`], [`blocks`] (attention and feed-forward, shared by all architectures),
//! then any architecture file. A new architecture is one file and one line in `ARCHITECTURES`.
//! Nothing here knows Vulkan.

pub mod blocks;
pub mod hparams;
mod qwen3moe;
pub mod rope;
pub mod weights;

use crate::error::Result;
use crate::gguf::Gguf;
use crate::graph::fuse::{Fusions, fuse};
use crate::graph::parts::{Border, Stream};
use crate::graph::{Graph, Op, TOP_RUNS, Tensor, Weight, WeightId};
use blocks::Layer;
use hparams::HParams;
use weights::{WeightInfo, WeightLoader};

/// Reads one architecture's hyper-parameters and layers.
type Load = fn(&mut WeightLoader<'_>) -> Result<(HParams, Vec<Layer>)>;

/// The architectures, by `general.architecture`.
const ARCHITECTURES: &[(&str, Load)] = &[("qwen3moe", qwen3moe::load)];

/// What reads an architecture, or that there is nothing.
fn loader_of(arch: &str) -> Result<Load, String> {
    let known = ARCHITECTURES.iter().find(|(name, _)| *name == arch);
    known.map(|(_, load)| *load).ok_or_else(|| {
        let names: Vec<&str> = ARCHITECTURES.iter().map(|(name, _)| *name).collect();
        format!("`{arch}` is not supported; supported: {}", names.join(", "))
    })
}

/// Says why an architecture cannot be run, if it cannot.
pub fn check_architecture(arch: &str) -> Result<(), String> {
    loader_of(arch).map(|_| ())
}

/// A model's structure. Its weights' bytes stay in the file.
#[derive(Debug)]
pub struct Model {
    /// Hyper-parameters.
    pub hparams: HParams,
    /// All weights, by [`WeightId`].
    pub weights: Vec<WeightInfo>,
    /// Embedding, `[n_vocab][n_embd]`.
    tok_embd: Weight,
    /// Norm before the head, `[n_embd]`.
    output_norm: WeightId,
    /// Head, `[n_vocab][n_embd]`; the embedding where it is tied.
    output: Weight,
    /// In order.
    pub layers: Vec<Layer>,
}

/// A part of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// From ids to the residual stream.
    Embedding,
    /// One layer.
    Layer(u32),
    /// From the residual stream to logits.
    Head,
}

/// What a forward pass is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PassShape {
    /// Tokens in.
    pub n_tokens: u32,
    /// Logits of the last so many tokens out.
    pub n_outputs: u32,
    /// Logits computed together: bounds the scratch that large vocabularies need.
    pub output_rows: u32,
    /// Read the `n` largest logits back instead of all of them.
    pub top: Option<u32>,
    /// Ranges of keys that attention computes apart.
    pub n_splits: u32,
    /// From so many tokens on, pairs are grouped by expert.
    pub group_from: u32,
    /// Pairs per tile of the grouped product.
    pub group_tile: u32,
    /// What the device's kernels do in one.
    pub fusions: Fusions,
}

impl Model {
    /// Reads the structure of a model and checks that every weight is there with the right shape.
    pub fn load(gguf: &Gguf) -> Result<Model> {
        let arch = gguf.metadata().require_str("general.architecture")?;
        let load =
            loader_of(arch).map_err(|problem| gguf.error("key `general.architecture`", problem))?;
        let mut loader = WeightLoader::new(gguf, arch);
        let (hparams, layers) = load(&mut loader)?;
        let (n_embd, n_vocab) = (hparams.n_embd, hparams.n_vocab);
        let tok_embd = loader.matrix("token_embd.weight", n_embd, n_vocab)?;
        let output_norm = loader.vector("output_norm.weight", n_embd)?;
        let output = match loader.optional_matrix("output.weight", n_embd, n_vocab)? {
            Some(output) => output,
            None => tok_embd,
        };
        Ok(Model { hparams, weights: loader.finish(), tok_embd, output_norm, output, layers })
    }

    /// The graph of one ubatch.
    pub fn graph(&self, pass: &PassShape) -> Graph {
        let mut g = Graph::default();
        let mut stream = self.embed(&mut g, pass);
        for il in 0..self.hparams.n_layer {
            stream = self.layer(&mut g, il, pass, stream);
        }
        self.head(&mut g, pass, stream);
        fuse(g, pass.fusions)
    }

    /// A part of the graph of one ubatch: the ops that it has there.
    pub fn part(&self, part: Part, pass: &PassShape) -> Graph {
        let mut g = Graph::default();
        g.border = match part {
            Part::Embedding => Border { enters: None, leaves: Some(self.embed(&mut g, pass)) },
            Part::Layer(il) => {
                let enters = self.entering(&mut g, il, pass);
                Border { enters: Some(enters), leaves: Some(self.layer(&mut g, il, pass, enters)) }
            }
            Part::Head => {
                let enters = self.entering(&mut g, self.hparams.n_layer, pass);
                self.head(&mut g, pass, enters);
                Border { enters: Some(enters), leaves: None }
            }
        };
        fuse(g, pass.fusions)
    }

    /// The residual stream behind so many layers.
    fn entering(&self, g: &mut Graph, n_layers: u32, pass: &PassShape) -> Stream {
        let mut tensor = || g.tensor(pass.n_tokens, self.hparams.n_embd);
        Stream { x: tensor(), delta: (n_layers > 0).then(tensor) }
    }

    /// Ids and their rows of the embedding.
    fn embed(&self, g: &mut Graph, pass: &PassShape) -> Stream {
        let tokens = g.tensor(pass.n_tokens, 1);
        g.tokens = Some(tokens);
        let x = g.tensor(pass.n_tokens, self.hparams.n_embd);
        let scale = self.hparams.embedding_scale;
        g.push(Op::GetRows { weights: self.tok_embd, ids: tokens, out: x, scale });
        // The output of a block joins the residual stream inside the next norm.
        Stream { x, delta: None }
    }

    fn layer(&self, g: &mut Graph, il: u32, pass: &PassShape, stream: Stream) -> Stream {
        self.layers[il as usize].build(g, il, &self.hparams, pass, stream)
    }

    /// Final norm and logits of the last `n_outputs` tokens, `output_rows` at a time.
    fn head(&self, g: &mut Graph, pass: &PassShape, Stream { x, delta }: Stream) {
        let first_token = pass.n_tokens - pass.n_outputs;
        let mut done = 0;
        while done < pass.n_outputs {
            let rows = pass.output_rows.min(pass.n_outputs - done);
            let take = |g: &mut Graph, x: Tensor| {
                if rows == pass.n_tokens {
                    return x;
                }
                let out = g.tensor(rows, self.hparams.n_embd);
                g.push(Op::CopyRows { x, first: first_token + done, out });
                out
            };
            let x = take(g, x);
            let eps = self.hparams.norm_eps;
            let normed = match delta {
                Some(delta) => {
                    let delta = take(g, delta);
                    g.add_rms_norm(delta, x, self.output_norm, eps).1
                }
                None => g.rms_norm(x, self.output_norm, eps),
            };
            let logits = g.mul_mat(self.output, None, normed);
            match pass.top {
                Some(k) => {
                    let (runs, top) = (g.tensor(rows, 2 * TOP_RUNS), g.tensor(2 * rows, k));
                    g.push(Op::ReadTop { logits, runs, top });
                }
                None => g.push(Op::ReadLogits { logits, first: done }),
            }
            done += rows;
        }
    }
}
