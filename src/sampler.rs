//! Picks the next token from the logits, in llama.cpp's order: penalties, top-k, top-p, min-p,
//! temperature, one random draw. Temperature 0 takes the best logit after penalties.
//!
//! Same parameters, seed and logits give the same tokens on every machine: ties go to the lower
//! id, sums run in a fixed order, and the generator is ChaCha8.

use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{Error, Result};

/// What the user asks for; the defaults are llama.cpp's.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerParams {
    /// `--temp`; 0 or less is greedy.
    pub temperature: f32,
    /// `--top-k`; 0 or less keeps all tokens.
    pub top_k: i32,
    /// `--top-p`; 1 or more is off.
    pub top_p: f32,
    /// `--min-p`; 0 or less is off.
    pub min_p: f32,
    /// `--repeat-penalty`; 1 is off.
    pub repeat_penalty: f32,
    /// `--repeat-last-n`, in tokens, for all three penalties; 0 is off, -1 is the whole text.
    pub repeat_last_n: i32,
    /// `--presence-penalty`; 0 is off.
    pub presence_penalty: f32,
    /// `--frequency-penalty`; 0 is off.
    pub frequency_penalty: f32,
    /// `--seed`; none draws one.
    pub seed: Option<u64>,
}

impl Default for SamplerParams {
    fn default() -> Self {
        SamplerParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
        }
    }
}

impl SamplerParams {
    /// Always the best token, no penalties.
    pub fn greedy() -> Self {
        SamplerParams { temperature: 0.0, seed: Some(0), ..Self::default() }
    }

    fn check(&self) -> Result<()> {
        let numbers = [
            ("--temp", self.temperature),
            ("--top-p", self.top_p),
            ("--min-p", self.min_p),
            ("--repeat-penalty", self.repeat_penalty),
            ("--presence-penalty", self.presence_penalty),
            ("--frequency-penalty", self.frequency_penalty),
        ];
        for (flag, value) in numbers {
            if !value.is_finite() {
                return Err(Error::usage(flag, format!("{value} is not a finite number")));
            }
        }
        if self.repeat_penalty <= 0.0 {
            let problem = format!("{} is not above 0; 1 is off", self.repeat_penalty);
            return Err(Error::usage("--repeat-penalty", problem));
        }
        if self.repeat_last_n < -1 {
            let problem = format!("{} is below -1 (the whole text)", self.repeat_last_n);
            return Err(Error::usage("--repeat-last-n", problem));
        }
        Ok(())
    }

    fn has_penalties(&self) -> bool {
        self.repeat_last_n != 0
            && (self.repeat_penalty != 1.0
                || self.presence_penalty != 0.0
                || self.frequency_penalty != 0.0)
    }
}

/// A token that is still in the running.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
}

/// Draws tokens; remembers those accepted, for the penalties.
#[derive(Debug)]
pub struct Sampler {
    params: SamplerParams,
    seed: u64,
    rng: ChaCha8Rng,
    /// The last `repeat_last_n` accepted tokens.
    recent: VecDeque<u32>,
    /// How often each token occurs in `recent`.
    counts: HashMap<u32, u32>,
    /// Kept between calls to spare an allocation of `n_vocab` entries per token.
    candidates: Vec<Candidate>,
    /// Weights of `candidates`, likewise.
    weights: Vec<f64>,
}

impl Sampler {
    /// Refuses parameters that are no numbers or make no sense.
    pub fn new(params: SamplerParams) -> Result<Self> {
        params.check()?;
        let seed = params.seed.unwrap_or_else(|| rand::random::<u32>().into());
        Ok(Sampler {
            params,
            seed,
            rng: ChaCha8Rng::seed_from_u64(seed),
            recent: VecDeque::new(),
            counts: HashMap::new(),
            candidates: Vec::new(),
            weights: Vec::new(),
        })
    }

    /// The seed in use, so that a run can be repeated.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The next token. `logits`: `[n_vocab]`; −∞ excludes a token, NaN and +∞ are errors.
    /// Does not [`Self::accept`] it.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        self.load(logits)?;
        self.penalize();
        if self.params.temperature <= 0.0 {
            return self.best();
        }
        self.keep_top_k();
        self.keep_top_p();
        self.keep_min_p();
        self.draw()
    }

    /// Tells the sampler that `id` is part of the text: every prompt token and every chosen one.
    pub fn accept(&mut self, id: u32) {
        if !self.params.has_penalties() {
            return;
        }
        self.recent.push_back(id);
        *self.counts.entry(id).or_default() += 1;
        let keeps_all = self.params.repeat_last_n < 0;
        if keeps_all || self.recent.len() <= self.params.repeat_last_n as usize {
            return;
        }
        if let Some(old) = self.recent.pop_front()
            && let Some(count) = self.counts.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&old);
            }
        }
    }

    fn load(&mut self, logits: &[f32]) -> Result<()> {
        if let Some(id) = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY) {
            let problem = format!(
                "the logit of token {id} is {}; the file is damaged or the model overflows",
                logits[id]
            );
            return Err(Error::Sampling(problem));
        }
        self.candidates.clear();
        let ids = logits.iter().zip(0..).filter(|(logit, _)| logit.is_finite());
        // Adding 0 turns -0 into 0, so that the two are a tie.
        self.candidates.extend(ids.map(|(&logit, id)| Candidate { id, logit: logit + 0.0 }));
        if self.candidates.is_empty() {
            return Err(Error::Sampling("no token has a finite logit".to_owned()));
        }
        Ok(())
    }

    fn penalize(&mut self) {
        if self.counts.is_empty() {
            return;
        }
        let p = &self.params;
        for c in &mut self.candidates {
            let Some(&count) = self.counts.get(&c.id) else { continue };
            // Toward less likely on both sides of 0.
            if c.logit > 0.0 {
                c.logit /= p.repeat_penalty;
            } else {
                c.logit *= p.repeat_penalty;
            }
            c.logit -= count as f32 * p.frequency_penalty + p.presence_penalty;
        }
    }

    fn best(&self) -> Result<u32> {
        let best = self.candidates.iter().min_by(|a, b| better_first(a, b));
        best.map(|c| c.id).ok_or_else(|| Error::Sampling("no token is left".to_owned()))
    }

    /// Sorts the candidates and keeps the first k; the steps after this one need the order.
    fn keep_top_k(&mut self) {
        let k = usize::try_from(self.params.top_k).unwrap_or(0);
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, better_first);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(better_first);
    }

    /// The shortest beginning whose probabilities, at temperature 1, sum to at least p.
    fn keep_top_p(&mut self) {
        if self.params.top_p >= 1.0 {
            return;
        }
        let total = self.weigh(1.0);
        let target = total * f64::from(self.params.top_p);
        let mut sum = 0.0;
        let enough = self.weights.iter().position(|weight| {
            sum += weight;
            sum >= target
        });
        self.candidates.truncate(enough.map_or(self.candidates.len(), |last| last + 1));
    }

    /// Those at least `min_p` times as likely as the best.
    fn keep_min_p(&mut self) {
        if self.params.min_p <= 0.0 {
            return;
        }
        let Some(best) = self.candidates.first() else { return };
        // min_p > 1 would exclude even the best one.
        let limit = best.logit + self.params.min_p.min(1.0).ln();
        let kept = self.candidates.partition_point(|c| c.logit >= limit);
        self.candidates.truncate(kept);
    }

    fn draw(&mut self) -> Result<u32> {
        let total = self.weigh(self.params.temperature);
        let mut left = self.rng.random::<f64>() * total;
        let drawn = self.weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        // Rounding may leave a remainder: then it is the last one that has any weight.
        let drawn = drawn.or_else(|| self.weights.iter().rposition(|&weight| weight > 0.0));
        let chosen = drawn.and_then(|i| self.candidates.get(i)).map(|c| c.id);
        chosen.ok_or_else(|| Error::Sampling("no token is left".to_owned()))
    }

    /// Fills `weights` with unnormalized probabilities of the sorted candidates; returns their sum.
    fn weigh(&mut self, temperature: f32) -> f64 {
        let best = self.candidates.first().map_or(0.0, |c| f64::from(c.logit));
        let weight = |c: &Candidate| ((f64::from(c.logit) - best) / f64::from(temperature)).exp();
        self.weights.clear();
        self.weights.extend(self.candidates.iter().map(weight));
        self.weights.iter().sum()
    }
}

/// Higher logit first, then lower id.
fn better_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}
