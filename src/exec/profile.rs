//! What the lanes did when: timestamps of submissions and copies, summed into [`StreamStats`], and with
//! tracing on those of every op, kept for a [`Trace`](crate::trace::Trace).

use crate::error::Result;
use crate::stream::overlap::{busy_ns, overlap_ns};
use crate::stream::stats::StreamStats;
use crate::stream::{CopyMarks, CopyRecord, Streamer};
use crate::trace::{Span, Track};
use crate::vk::{Calibration, Clock, Device, Lane, QueryPool, Recorder};
use std::sync::Arc;
use std::time::Duration;

/// Spans timed in a pass, two timestamps each; later ones go untimed. 200 GB through the ring are
/// 13,000 copies.
const MAX_SPANS: u32 = 32_768;
/// Of a long pass, the stage that is recorded has one half of the compute lane's, the one that runs the
/// other.
const STAGE_SPANS: u32 = MAX_SPANS / 2;
/// Clocks drift apart by some 20 µs a second.
const MAX_DRIFT: Duration = Duration::from_millis(500);
/// Spans that a trace keeps.
const MAX_TRACE: usize = 2_000_000;

/// What a pair of timestamps on the compute lane belongs to.
#[derive(Clone, Debug)]
pub(super) enum ComputeMark {
    /// A submission.
    Segment {
        /// Its estimated time.
        estimate_ns: f64,
        /// It reads weights over the bus.
        reads_host: bool,
    },
    /// A dispatch.
    Op {
        /// What to call it.
        name: String,
        /// Layer.
        il: Option<u32>,
    },
}

/// What the timestamps of a range of queries belong to, in pairs.
#[derive(Default)]
pub(super) struct MarkList {
    /// The first query.
    first: u32,
    /// Pairs that there was room for.
    room: u32,
    marks: Vec<ComputeMark>,
}

impl MarkList {
    /// Whether later spans may have gone untimed.
    fn is_full(&self) -> bool {
        self.marks.len() >= self.room as usize
    }
}

/// Writes timestamps while a pass is recorded.
pub(super) struct Marks {
    pool: QueryPool,
    per_op: bool,
    list: MarkList,
    /// Query of the open submission.
    segment: Option<usize>,
    op: Option<u32>,
}

impl Marks {
    pub(super) fn new(pool: QueryPool, per_op: bool) -> Self {
        let list = MarkList { first: 0, room: MAX_SPANS, marks: Vec::new() };
        Marks { pool, per_op, list, segment: None, op: None }
    }

    pub(super) fn into_list(self) -> MarkList {
        self.list
    }

    /// Begins stage `n` of a pass, between submissions; gives what belongs to the stage before, which must
    /// have been read when the next one begins.
    pub(super) fn begin_stage(&mut self, n: usize) -> MarkList {
        let first = if n.is_multiple_of(2) { 0 } else { 2 * STAGE_SPANS };
        std::mem::replace(&mut self.list, MarkList { first, room: STAGE_SPANS, marks: Vec::new() })
    }

    /// Whether the stage should end soon, so that everything is timed.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.list.marks.len() as u32 > self.list.room / 2
    }

    pub(super) fn begin_segment(&mut self, recorder: &mut Recorder) {
        let mark = ComputeMark::Segment { estimate_ns: 0.0, reads_host: false };
        let index = self.list.marks.len();
        self.segment = self.begin(recorder, mark).map(|_| index);
    }

    pub(super) fn end_segment(&mut self, recorder: &mut Recorder, estimate: f64, host: bool) {
        let Some(index) = self.segment.take() else { return };
        let mark = ComputeMark::Segment { estimate_ns: estimate, reads_host: host };
        self.list.marks[index] = mark;
        recorder.write_timestamp(&self.pool, self.list.first + index as u32 * 2 + 1);
    }

    pub(super) fn begin_op(
        &mut self,
        recorder: &mut Recorder,
        name: impl FnOnce() -> String,
        il: Option<u32>,
    ) {
        if self.per_op {
            self.op = self.begin(recorder, ComputeMark::Op { name: name(), il });
        }
    }

    pub(super) fn end_op(&mut self, recorder: &mut Recorder) {
        if let Some(query) = self.op.take() {
            recorder.write_timestamp(&self.pool, query + 1);
        }
    }

    fn begin(&mut self, recorder: &mut Recorder, mark: ComputeMark) -> Option<u32> {
        if self.list.is_full() {
            return None;
        }
        let query = self.list.first + self.list.marks.len() as u32 * 2;
        self.list.marks.push(mark);
        recorder.reset_timestamps(&self.pool, query..query + 2);
        recorder.write_timestamp(&self.pool, query);
        Some(query)
    }
}

/// The timestamps of a pass's copies.
pub(super) struct CopyTimes {
    /// None where the copy queue has no timestamps.
    pool: Option<QueryPool>,
    copies: Vec<CopyRecord>,
    open: Option<u32>,
}

impl CopyMarks for CopyTimes {
    fn begin(&mut self, recorder: &mut Recorder, copy: CopyRecord) {
        let query = self.copies.len() as u32 * 2;
        self.copies.push(copy);
        self.open = (query < 2 * MAX_SPANS).then_some(query);
        if let (Some(query), Some(pool)) = (self.open, &self.pool) {
            recorder.write_timestamp(pool, query);
        }
    }

    fn end(&mut self, recorder: &mut Recorder) {
        if let (Some(query), Some(pool)) = (self.open.take(), &self.pool) {
            recorder.write_timestamp(pool, query + 1);
        }
    }
}

/// Start and end on the common clock.
type Interval = (u64, u64);

/// Sums up passes.
pub(super) struct Profile {
    device: Arc<Device>,
    /// Of the beginning of the pass, if the device can tell.
    calibration: Option<Calibration>,
    /// The first tick ever seen: the origin for devices that cannot.
    first_tick: Option<u64>,
    pub(super) copy_times: CopyTimes,
    /// When the compute lane was busy in this pass, as far as that was read.
    compute: Vec<Interval>,
    stats: StreamStats,
    trace: Option<Spans>,
    /// Whether the pass takes what its like will: none of its kernels had to be compiled.
    pub(super) is_typical: bool,
}

impl Profile {
    pub(super) fn new(device: &Arc<Device>, tracing: bool, streaming: bool) -> Result<Self> {
        let pool = match streaming {
            true => QueryPool::new(device, Lane::Copy, "copies", 2 * MAX_SPANS).ok(),
            false => None,
        };
        Ok(Profile {
            device: device.clone(),
            calibration: device.calibration()?,
            first_tick: None,
            copy_times: CopyTimes { pool, copies: Vec::new(), open: None },
            compute: Vec::new(),
            stats: StreamStats::default(),
            trace: tracing.then(Spans::default),
            is_typical: true,
        })
    }

    /// The pool that [`Marks`] write to.
    pub(super) fn compute_pool(device: &Arc<Device>) -> Result<QueryPool> {
        QueryPool::new(device, Lane::Compute, "pass", 2 * MAX_SPANS)
    }

    /// Forgets the copies of the last pass. Nothing is pending.
    pub(super) fn begin_pass(&mut self) -> Result<()> {
        self.is_typical = true;
        let age = self.calibration.map_or(Duration::ZERO, |c| c.instant.elapsed());
        if age > MAX_DRIFT {
            self.calibration = self.device.calibration()?;
        }
        let n = self.copy_times.copies.len().min(MAX_SPANS as usize) as u32;
        if let (Some(pool), 1..) = (&self.copy_times.pool, n) {
            pool.reset(0..2 * n);
        }
        self.copy_times.copies.clear();
        self.compute.clear();
        Ok(())
    }

    /// Reads the timestamps of a stage, or of a whole pass, that is done; gives each submission's estimate
    /// and time.
    pub(super) fn end_stage(
        &mut self,
        pool: &QueryPool,
        list: &MarkList,
    ) -> Result<Vec<(f64, f64)>> {
        let mut learned = Vec::new();
        let times = self.intervals(pool, list.first, list.marks.len())?;
        for (mark, (start, end)) in list.marks.iter().zip(times) {
            match mark {
                ComputeMark::Segment { estimate_ns, reads_host } => {
                    self.compute.push((start, end));
                    if !reads_host {
                        learned.push((*estimate_ns, end.saturating_sub(start) as f64));
                    }
                }
                ComputeMark::Op { name, il } => {
                    if let Some(trace) = &mut self.trace {
                        let (track, name, il) = (Track::Compute, name.clone(), *il);
                        trace.push(Span {
                            track,
                            name,
                            il,
                            start_ns: start,
                            end_ns: end,
                            bytes: 0,
                        });
                    }
                }
            }
        }
        if let Some(trace) = self.trace.as_mut().filter(|_| list.is_full()) {
            trace.cut("of a pass", list.room as usize);
        }
        Ok(learned)
    }

    /// Sums up a pass that is done, all stages of which were read. `ubatches`: their tokens.
    pub(super) fn end_pass(
        &mut self,
        mut streamer: Option<&mut Streamer>,
        ubatches: &[u32],
        wall: Duration,
    ) -> Result<()> {
        let copies = self.end_copies(streamer.as_deref_mut())?;
        let streamed_bytes: u64 = self.copy_times.copies.iter().map(|c| c.bytes).sum();
        let direct_bytes_of = |&n: &u32| streamer.as_deref().map_or(0, |s| s.direct_bytes(n));
        let direct_bytes = ubatches.iter().map(direct_bytes_of).sum();
        let cache_stats = streamer.as_deref_mut().map(Streamer::take_cache_stats);
        if let (Some(streamer), Some(&n_tokens), true) =
            (streamer, ubatches.first(), self.is_typical)
        {
            let bytes = streamed_bytes + direct_bytes;
            streamer.learn_pass(n_tokens, bytes, wall.as_nanos() as u64);
        }
        let n_copies = self.copy_times.copies.len();
        if let Some(trace) = self.trace.as_mut().filter(|_| n_copies >= MAX_SPANS as usize) {
            trace.cut("of a pass", MAX_SPANS as usize);
        }
        self.stats.add(&StreamStats {
            streamed_bytes,
            direct_bytes,
            copy_ns: busy_ns(&copies),
            compute_ns: busy_ns(&self.compute),
            both_ns: overlap_ns(&copies, &self.compute),
            wall_ns: wall.as_nanos() as u64,
            ..cache_stats.unwrap_or_default()
        });
        Ok(())
    }

    fn end_copies(&mut self, streamer: Option<&mut Streamer>) -> Result<Vec<Interval>> {
        let (Some(pool), Some(streamer)) = (self.copy_times.pool.clone(), streamer) else {
            return Ok(Vec::new());
        };
        let times = self.intervals(&pool, 0, self.copy_times.copies.len())?;
        // All together: copies may run beside each other.
        let bytes = self.copy_times.copies.iter().map(|copy| copy.bytes).sum();
        streamer.learn_link(bytes, busy_ns(&times));
        for (copy, &(start, end)) in self.copy_times.copies.iter().zip(&times) {
            let tensor = &streamer.tensors()[copy.tensor];
            if let Some(trace) = &mut self.trace {
                let name = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name).to_string();
                let (track, il, bytes) = (Track::Copy, tensor.il, copy.bytes);
                trace.push(Span { track, name, il, start_ns: start, end_ns: end, bytes });
            }
        }
        Ok(times)
    }

    /// `n` spans of a pool, from query `first` on.
    fn intervals(&mut self, pool: &QueryPool, first: u32, n: usize) -> Result<Vec<Interval>> {
        let n = n.min(MAX_SPANS as usize) as u32;
        if n == 0 {
            return Ok(Vec::new());
        }
        let ticks = pool.read_ticks(first..first + 2 * n)?;
        let format = pool.tick_format();
        let clock = match &self.calibration {
            Some(calibration) => Clock::new(calibration, format),
            None => Clock::uncalibrated(*self.first_tick.get_or_insert(ticks[0]), format),
        };
        let ns = |tick: u64| clock.to_ns(tick);
        Ok(ticks.chunks_exact(2).map(|pair| (ns(pair[0]), ns(pair[1]))).collect())
    }

    /// What happened since the last call.
    pub(super) fn take_stats(&mut self) -> StreamStats {
        std::mem::take(&mut self.stats)
    }

    /// The spans since the last call, if tracing is on.
    pub(super) fn take_trace(&mut self) -> Option<Vec<Span>> {
        self.trace.as_mut().map(|trace| std::mem::take(&mut trace.spans))
    }
}

/// The spans of a trace, up to [`MAX_TRACE`].
#[derive(Default)]
struct Spans {
    spans: Vec<Span>,
    /// The user was told that there are more.
    told: bool,
}

impl Spans {
    fn push(&mut self, span: Span) {
        match self.spans.len() < MAX_TRACE {
            true => self.spans.push(span),
            false => self.cut("of the run", MAX_TRACE),
        }
    }

    /// Says once that something is missing.
    fn cut(&mut self, what: &str, kept: usize) {
        if !std::mem::replace(&mut self.told, true) {
            log::warn!("the trace holds the first {kept} spans {what}, and no more");
        }
    }
}
