//! Twin of router, one token at a time.

use std::cmp::Ordering;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gating {
    Softmax = 0,
    Sigmoid = 1,
    SoftmaxOfChosen = 2,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Router {
    pub(crate) n_expert: usize,
    pub(crate) n_used: usize,
    pub(crate) gating: Gating,
    pub(crate) norm: bool,
    pub(crate) norm_min: f32,
    pub(crate) scale: f32,
    /// Groups and how many of them are used; 0 or 1 groups = off.
    pub(crate) groups: (usize, usize),
}

/// Largest first, of equals the lower index; `values` without NaN.
fn descending(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| {
        values[b].partial_cmp(&values[a]).unwrap_or(Ordering::Equal).then(a.cmp(&b))
    });
    order
}

fn softmax(values: &[f64]) -> Vec<f64> {
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp: Vec<f64> = values.iter().map(|v| (v - most).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.iter().map(|e| e / sum).collect()
}

impl Router {
    /// What the choice is made by, and what becomes the weights.
    pub(crate) fn scores(&self, logits: &[f32]) -> Vec<f64> {
        let logits: Vec<f64> = logits.iter().map(|&l| f64::from(l)).collect();
        match self.gating {
            Gating::Softmax => softmax(&logits),
            Gating::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
            Gating::SoftmaxOfChosen => logits,
        }
    }

    /// Ids in descending order of score + bias.
    pub(crate) fn choose(&self, scores: &[f64], bias: Option<&[f32]>) -> Vec<u32> {
        let biased: Vec<f64> = scores
            .iter()
            .enumerate()
            .map(|(i, s)| s + bias.map_or(0.0, |b| f64::from(b[i])))
            .collect();
        let order = descending(&biased);
        let in_play = |&i: &usize| {
            self.groups.0 <= 1
                || self.best_groups(&biased).contains(&(i * self.groups.0 / self.n_expert))
        };
        let (mut chosen, rest): (Vec<usize>, Vec<usize>) = order.into_iter().partition(in_play);
        let mut rest = rest;
        rest.sort_unstable();
        chosen.extend(rest);
        chosen.iter().take(self.n_used).map(|&i| i as u32).collect()
    }

    fn best_groups(&self, biased: &[f64]) -> Vec<usize> {
        let (n_group, n_used) = self.groups;
        let sums: Vec<f64> = biased
            .chunks(self.n_expert / n_group)
            .map(|group| descending(group).iter().take(2).map(|&i| group[i]).sum())
            .collect();
        descending(&sums).into_iter().take(n_used).collect()
    }

    /// Weights of the chosen.
    pub(crate) fn weights(&self, scores: &[f64], ids: &[u32]) -> Vec<f64> {
        let chosen: Vec<f64> = ids.iter().map(|&id| scores[id as usize]).collect();
        let sum: f64 = chosen.iter().sum();
        let weights = match (self.gating, self.norm) {
            (Gating::SoftmaxOfChosen, _) => softmax(&chosen),
            (_, true) => chosen.iter().map(|c| c / sum.max(f64::from(self.norm_min))).collect(),
            (_, false) => chosen,
        };
        weights.iter().map(|w| w * f64::from(self.scale)).collect()
    }
}
