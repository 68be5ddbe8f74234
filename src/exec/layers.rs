//! A batch of several ubatches, one layer at a time: while all of them pass a layer, the experts of the next
//! one arrive, and each expert tensor is moved once. The residual stream stays behind the activations, as
//! [`BatchLayout`](crate::graph::parts::BatchLayout) says; kernels and their sizes are those of the ubatch.

use super::record::{Recording, Sink, Unit};
use super::run::{Executor, Pass, Workspace, kernels_of};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::graph::scratch::{self, Layout};
use crate::model::{Part, PassShape};
use crate::stream::Tokens;
use std::collections::HashSet;
use std::time::Instant;

/// Is told how many tokens have passed how many layers, as their product; an error ends the batch.
pub type Watch<'a> = dyn FnMut(u64) -> Result<()> + 'a;

impl Executor {
    /// Runs embedding and layers of the ubatches of a batch, if going layer by layer is possible and worth it;
    /// otherwise nothing is done. The heads follow one by one with [`run_head`](Self::run_head).
    pub fn run_layers(&mut self, batch: &[Pass<'_>], watch: &mut Watch<'_>) -> Result<bool> {
        if !(2..=self.workspace.n_ubatches).contains(&batch.len()) || !self.begin_layers(batch)? {
            return Ok(false);
        }
        let since = Instant::now();
        self.prepare_layers(batch)?;
        self.workspace.write_inputs(batch)?;
        self.profile.begin_pass()?;
        let result = self.record_layers(batch, watch).and_then(|()| self.tell_last_routes(batch));
        if result.is_err() {
            // The next pass overwrites what this one reads. If this fails as well, it is for the same reason.
            let _ = self.workspace.device.wait_all("what was begun of a batch");
        }
        // What an interrupted batch moved counts.
        if !matches!(result, Ok(()) | Err(Error::Interrupted)) {
            return result.map(|()| true);
        }
        let ubatches: Vec<u32> = batch.iter().map(|pass| pass.shape.n_tokens).collect();
        self.profile.end_pass(self.streamer.as_mut(), &ubatches, since.elapsed())?;
        result?;
        if let Some(streamer) = &self.streamer {
            streamer.check_pages()?;
        }
        self.check_status()?;
        Ok(true)
    }

    /// Runs the head of a ubatch whose layers are done. `ubatch`: its number in the batch.
    pub fn run_head(&mut self, pass: &Pass<'_>, ubatch: usize) -> Result<()> {
        let since = Instant::now();
        self.profile.begin_pass()?;
        self.reserve_results(pass)?;
        let (graph, layout) = self.workspace.part(Part::Head, pass, ubatch)?;
        let steps = self.workspace.steps(pass, &graph, &layout, None);
        self.profile.is_typical &= !self.workspace.kernels.prepare(kernels_of(&steps))?;
        let (layout, steps) = (&layout, &steps[..]);
        let unit = Unit { pass, graph: &graph, layout, steps, ubatch, frees_slots: false };
        let (workspace, profile) = (&self.workspace, &mut self.profile);
        let sink = Sink::Submit(Vec::new());
        let (recorded, points) = Recording::new(workspace, None, profile, pass, sink).all(&unit)?;
        self.wait(pass, &points)?;
        self.learn(&recorded)?;
        self.profile.end_pass(None, &[], since.elapsed())?;
        self.check_status()
    }

    /// Has the streamer decide.
    fn begin_layers(&mut self, batch: &[Pass<'_>]) -> Result<bool> {
        let (Some(first), Some(streamer)) = (batch.first(), &mut self.streamer) else {
            return Ok(false);
        };
        let tokens = Tokens {
            n_ubatch: first.shape.n_tokens,
            n_batch: batch.iter().map(|pass| pass.shape.n_tokens).sum(),
        };
        let outlook = self.workspace.outlook(first, &first.model.graph(&first.shape));
        streamer.begin_layers(first.residency, tokens, outlook)
    }

    /// Tells the expert cache what the last ubatch chose.
    fn tell_last_routes(&mut self, batch: &[Pass<'_>]) -> Result<()> {
        let Some(last) = batch.last() else { return Ok(()) };
        self.tell_routes(self.workspace.n_ubatch, last.shape.n_tokens)
    }

    /// Builds the pipelines of all parts.
    fn prepare_layers(&mut self, batch: &[Pass<'_>]) -> Result<()> {
        let mut known: HashSet<PassShape> = HashSet::new();
        let workspace = &mut self.workspace;
        for (ubatch, pass) in batch.iter().enumerate().filter(|(_, p)| known.insert(p.shape)) {
            for part in parts(pass) {
                let (graph, layout) = workspace.part(part, pass, ubatch)?;
                let steps = workspace.steps(pass, &graph, &layout, self.streamer.as_ref());
                self.profile.is_typical &= !workspace.kernels.prepare(kernels_of(&steps))?;
            }
        }
        Ok(())
    }

    /// Records and submits everything, and waits for it.
    fn record_layers(&mut self, batch: &[Pass<'_>], watch: &mut Watch<'_>) -> Result<()> {
        let Some(first) = batch.first() else { return Ok(()) };
        let (workspace, streamer) = (&self.workspace, self.streamer.as_mut());
        let sink = Sink::Submit(Vec::new());
        let mut recording = Recording::new(workspace, streamer, &mut self.profile, first, sink);
        let result = layer_by_layer(&mut recording, batch, watch);
        let pace = recording.pace;
        self.workspace.pace = pace;
        result
    }
}

impl Workspace {
    /// The graph of a part of a ubatch, and where its tensors are.
    fn part(&self, part: Part, pass: &Pass<'_>, ubatch: usize) -> Result<(Graph, Layout)> {
        let graph = pass.model.part(part, &pass.shape);
        let routes = self.routes.as_ref();
        let routes = routes.map_or_else(Vec::new, |r| r.fixed(&graph, self.n_ubatch));
        let fixed = [self.batch.fixed(&graph, ubatch), routes].concat();
        let layout = scratch::plan_beside(&graph, &fixed);
        self.check_scratch(pass, &layout)?;
        Ok((graph, layout))
    }
}

/// What comes before the heads.
fn parts(pass: &Pass<'_>) -> impl Iterator<Item = Part> {
    [Part::Embedding].into_iter().chain((0..pass.model.hparams.n_layer).map(Part::Layer))
}

fn layer_by_layer(
    recording: &mut Recording<'_>,
    batch: &[Pass<'_>],
    watch: &mut Watch<'_>,
) -> Result<()> {
    let (workspace, Some(first)) = (recording.workspace, batch.first()) else { return Ok(()) };
    recording.batch_inputs(batch.len(), &workspace.batch)?;
    recording.advance()?;
    let mut done = 0;
    for part in parts(first) {
        for (ubatch, pass) in batch.iter().enumerate() {
            let (graph, layout) = workspace.part(part, pass, ubatch)?;
            let steps = workspace.steps(pass, &graph, &layout, recording.streamer.as_deref());
            let (layout, steps) = (&layout, &steps[..]);
            let frees_slots = ubatch + 1 == batch.len();
            recording.unit(&Unit { pass, graph: &graph, layout, steps, ubatch, frees_slots })?;
            if part != Part::Embedding {
                done += u64::from(pass.shape.n_tokens);
            }
            recording.end_stage(done, false)?.map_or(Ok(()), &mut *watch)?;
        }
    }
    recording.results(workspace.n_ubatch)?;
    recording.end_stage(done, true)?.map_or(Ok(()), &mut *watch)?;
    recording.end_last_stage()?.map_or(Ok(()), watch)
}
