//! `vkmoe perplexity`: how well a model predicts a text, in llama.cpp's way: the text is cut into
//! chunks of the context's size, and each chunk's second half is scored.

use super::trace_file::TraceFile;
use super::{emit, note_logits_hash, open_engine, read_text, tokenizer, write_trace};
use crate::cli::PerplexityArgs;
use crate::engine::{Engine, Outputs, Session};
use crate::error::{Error, Result};
use crate::progress;
use crate::tokenizer::Special;

/// Context without `-c`, as in llama.cpp's tool.
const DEFAULT_CTX: u32 = 512;

pub(super) fn run(args: &PerplexityArgs) -> Result<()> {
    let text = read_text(&args.file)?;
    let mut engine_args = args.engine.clone();
    if engine_args.ctx_size == 0 {
        engine_args.ctx_size = DEFAULT_CTX;
    }
    let trace = TraceFile::create(args.engine.trace.as_deref())?;
    let mut engine = open_engine(&engine_args)?;
    let tokenizer = tokenizer(engine.gguf())?;
    let tokens = tokenizer.encode(&text, Special::Plain)?;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    let n_ctx = engine.n_ctx() as usize;
    if tokens.len() < n_ctx {
        let problem = format!("has {} tokens, one chunk needs {n_ctx} (-c)", tokens.len());
        return Err(Error::usage(args.file.display().to_string(), problem));
    }
    let n_chunks = (tokens.len() / n_ctx).min(args.chunks.unwrap_or(usize::MAX));
    let bar = progress::count_bar("perplexity", n_chunks as u64);
    let mut scores = Scores::default();
    let mut session = engine.session()?;
    for chunk in tokens.chunks_exact(n_ctx).take(n_chunks) {
        score_chunk(&mut engine, &mut session, chunk, bos, &mut scores)?;
        bar.set_message(format!("perplexity {:.4}", scores.perplexity()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    note_logits_hash(&session);
    engine.close(session);
    write_trace(trace, &mut engine)?;
    emit(&format!(
        "perplexity {:.4} ± {:.4} ({} tokens in {n_chunks} chunks of {n_ctx})\n",
        scores.perplexity(),
        scores.error(),
        scores.n,
    ))
}

/// Scores the second half of a chunk. Its first token is replaced by BOS where the model wants one.
fn score_chunk(
    engine: &mut Engine,
    session: &mut Session,
    chunk: &[u32],
    bos: Option<u32>,
    scores: &mut Scores,
) -> Result<()> {
    let mut input = chunk.to_vec();
    if let (Some(bos), Some(first)) = (bos, input.first_mut()) {
        *first = bos;
    }
    session.truncate(0);
    let half = chunk.len() / 2;
    engine.eval(session, &input[..half], Outputs::None, |_, _| Ok(()))?;
    engine.eval(session, &input[half..], Outputs::All, |position, logits| {
        if let Some(&next) = chunk.get(position as usize + 1) {
            scores.add(negative_log_likelihood(logits, next));
        }
        Ok(())
    })
}

/// Sums of negative log likelihoods.
#[derive(Default)]
struct Scores {
    n: u64,
    sum: f64,
    sum_of_squares: f64,
}

impl Scores {
    fn add(&mut self, nll: f64) {
        self.n += 1;
        self.sum += nll;
        self.sum_of_squares += nll * nll;
    }

    fn perplexity(&self) -> f64 {
        (self.sum / self.n.max(1) as f64).exp()
    }

    /// Standard error of the perplexity.
    fn error(&self) -> f64 {
        let n = self.n.max(2) as f64;
        let mean = self.sum / n;
        let variance = (self.sum_of_squares / n - mean * mean).max(0.0);
        (variance / (n - 1.0)).sqrt() * self.perplexity()
    }
}

fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_logits_have_the_perplexity_of_the_vocabulary() {
        let mut scores = Scores::default();
        for token in 0..8 {
            scores.add(negative_log_likelihood(&[3.0; 8], token));
        }
        assert!((scores.perplexity() - 8.0).abs() < 1e-9);
        assert!(scores.error() < 1e-6);
    }
}
