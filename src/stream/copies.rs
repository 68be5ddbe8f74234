//! A copy of a tensor's bytes as submissions on the copy lane: from where it is pinned, or in pieces through
//! the ring.

use super::host_tensor::HostTensor;
use super::packing::{self, ChunkRegion, Piece};
use super::pins::Pinned;
use super::ring::{self, Ring};
use crate::error::Result;
use crate::gguf::Gguf;
use crate::vk::{Buffer, Commands, Device, Lane, Point, Recorder, Region, Replay};
use std::ops::Range;
use std::sync::Arc;

/// A submission of the copy lane, for statistics.
pub struct CopyRecord {
    /// The tensor, by index into the streamer's.
    pub tensor: usize,
    /// Bytes copied.
    pub bytes: u64,
}

/// Takes note of copies as they are recorded.
pub trait CopyMarks {
    /// A copy begins.
    fn begin(&mut self, recorder: &mut Recorder, copy: CopyRecord);
    /// It ends.
    fn end(&mut self, recorder: &mut Recorder);
}

/// Where bytes of a tensor go.
pub(super) struct Target<'a> {
    /// The place of a byte.
    pub(super) place: &'a dyn Fn(u64) -> Piece,
    /// The buffer of a chunk.
    pub(super) buffer: &'a dyn Fn(usize) -> &'a Buffer,
}

/// Bytes of a tensor on their way to the device.
pub(super) struct Transfer<'a> {
    pub(super) device: &'a Arc<Device>,
    /// The tensor, and its index.
    pub(super) tensor: (usize, &'a HostTensor),
    pub(super) target: Target<'a>,
    /// Which of its bytes, ascending.
    pub(super) ranges: &'a [Range<u64>],
    /// What every submission waits for: that the first did says nothing about the start of the others.
    pub(super) waits: &'a [Point],
    /// Whether it may run beside the copy before, if it is one submission.
    pub(super) beside: bool,
}

impl Transfer<'_> {
    /// From pinned memory, in one submission.
    pub(super) fn out_of_pinned(
        &self,
        pinned: &Pinned,
        marks: &mut dyn CopyMarks,
    ) -> Result<Point> {
        let regions = self.regions_of(pinned);
        let commands = self.record(&regions, &|chunk| &pinned.buffers[chunk], marks)?;
        match self.beside {
            true => self.device.submit_beside(Lane::Copy, &[&commands], self.waits),
            false => self.device.submit(Lane::Copy, &[&commands], self.waits),
        }
    }

    /// From pinned memory, as a part of somebody's submission.
    pub(super) fn record_out_of_pinned(&self, pinned: &Pinned, recorder: &mut Recorder) {
        self.copy(&self.regions_of(pinned), &|chunk| &pinned.buffers[chunk], recorder);
    }

    fn regions_of(&self, pinned: &Pinned) -> Vec<ChunkRegion> {
        let from = |at| packing::locate(&pinned.pieces, self.matrix_bytes(), at);
        self.ranges.iter().flat_map(|range| self.regions(range.clone(), from)).collect()
    }

    /// Through the ring, a submission for each piece. The point is that of the last.
    pub(super) fn through_ring(
        &self,
        ring: &mut Ring,
        gguf: &Gguf,
        marks: &mut dyn CopyMarks,
    ) -> Result<Point> {
        let (_, tensor) = self.tensor;
        let info = &gguf.tensors()[tensor.tensor];
        let mut last = None;
        for parts in ring::cut(self.ranges, ring.piece_bytes(), tensor.file.offset) {
            let bytes = parts.last().map_or(0, |(range, offset)| offset + range.end - range.start);
            let read = |memory: &mut [u8]| gguf.read_parts(info, &parts, memory);
            let (index, buffer) = ring.fill(self.device, bytes, read)?;
            let regions = parts.iter().flat_map(|(range, offset)| {
                let from = |at| Piece { chunk: 0, offset: offset + at - range.start };
                self.regions(range.clone(), from)
            });
            let regions: Vec<ChunkRegion> = regions.collect();
            let commands = self.record(&regions, &|_| &buffer, marks)?;
            let point = self.device.submit(Lane::Copy, &[&commands], self.waits)?;
            ring.copied(index, point);
            last = Some(point);
        }
        gguf.check()?;
        match last {
            Some(point) => Ok(point),
            None => self.device.submit(Lane::Copy, &[], self.waits),
        }
    }

    fn matrix_bytes(&self) -> u64 {
        self.tensor.1.file.matrix_bytes
    }

    /// The regions of one range.
    fn regions(&self, range: Range<u64>, from: impl Fn(u64) -> Piece) -> Vec<ChunkRegion> {
        packing::regions(range, self.matrix_bytes(), from, self.target.place)
    }

    /// The commands of one submission.
    fn record<'b>(
        &self,
        regions: &[ChunkRegion],
        source: &dyn Fn(usize) -> &'b Buffer,
        marks: &mut dyn CopyMarks,
    ) -> Result<Commands> {
        let (tensor, HostTensor { name, .. }) = self.tensor;
        let mut recorder = Recorder::new(self.device, Lane::Copy, name, Replay::Once)?;
        let bytes = regions.iter().map(|r| r.bytes).sum();
        marks.begin(&mut recorder, CopyRecord { tensor, bytes });
        self.copy(regions, source, &mut recorder);
        marks.end(&mut recorder);
        recorder.finish()
    }

    fn copy<'b>(
        &self,
        regions: &[ChunkRegion],
        source: &dyn Fn(usize) -> &'b Buffer,
        recorder: &mut Recorder,
    ) {
        let same_buffers = |a: &ChunkRegion, b: &ChunkRegion| {
            (a.from.chunk, a.to.chunk) == (b.from.chunk, b.to.chunk)
        };
        for run in regions.chunk_by(same_buffers) {
            let Some(first) = run.first() else { continue };
            let region =
                |r: &ChunkRegion| Region { from: r.from.offset, to: r.to.offset, bytes: r.bytes };
            let list: Vec<Region> = run.iter().map(region).collect();
            let to = (self.target.buffer)(first.to.chunk);
            recorder.copy_regions(source(first.from.chunk), to, &list);
        }
    }
}
