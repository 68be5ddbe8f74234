//! Pins the host source in the background: chunk by chunk, in the order of first use, while the first
//! tokens already run. What is not pinned yet, or never will be, goes through the ring.
//!
//! A chunk takes two steps that use different parts of the machine: one that the CPU's cores can share
//! (reading the file, or copying its pages) and one inside the driver (pinning pages). So one chunk's
//! second step runs beside the next one's first.

use super::chunks::{Chunk, ChunkPlan, Content, FileTensor};
use super::host_tensor::HostTensor;
use super::options::HostSource;
use super::packing::{Matrices, Piece, pack};
use super::pin_budget::{Limit, PinBudget, PinReport};
use crate::error::{Error, Result};
use crate::gguf::{Gguf, PrivateMapping};
use crate::vk::{Arena, Buffer, Device, DeviceKind, HostPages, MemoryKind, lock};
use indicatif::ProgressBar;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// Chunks are no larger, so that the first tensors can soon be read where they are.
const PIN_CHUNK_BYTES: u64 = 256 << 20;

/// A tensor that the device can read in host memory.
pub struct Pinned {
    /// The chunks that hold it.
    pub buffers: Vec<Buffer>,
    /// By expert, into `buffers`.
    pub pieces: Vec<Piece>,
}

impl Pinned {
    /// Device address of an expert.
    pub fn address(&self, expert: usize) -> u64 {
        let piece = self.pieces[expert];
        self.buffers[piece.chunk].address() + piece.offset
    }
}

/// What to pin.
pub struct PinJob {
    /// For this device.
    pub device: Arc<Device>,
    /// From this file.
    pub gguf: Arc<Gguf>,
    /// How. Not the ring.
    pub source: HostSource,
    /// In the order of use.
    pub tensors: Vec<HostTensor>,
    /// How much.
    pub budget: PinBudget,
    /// `RLIMIT_MEMLOCK`, which may explain a refusal.
    pub memlock_bytes: Option<u64>,
    /// Shows bytes pinned.
    pub bar: ProgressBar,
}

/// The pinning thread. Dropping this stops it after the chunk it is at.
pub struct Pins {
    shared: Arc<Shared>,
    bar: ProgressBar,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    stop: AtomicBool,
    finished: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// Complete, and not taken yet: index of the tensor.
    ready: Vec<(usize, Pinned)>,
    report: PinReport,
    /// The file could not be read.
    failed: Option<Error>,
}

impl Pins {
    /// Begins to pin.
    pub fn start(job: PinJob) -> Result<Pins> {
        let report = PinReport {
            pinned_bytes: 0,
            wanted_bytes: job.tensors.iter().map(|t| t.file.bytes()).sum(),
            source: job.source,
            limit: job.budget.limited_by.clone(),
        };
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            state: Mutex::new(State { ready: Vec::new(), report, failed: None }),
        });
        let theirs = shared.clone();
        let bar = job.bar.clone();
        let work = move || {
            let since = Instant::now();
            let result = Pinning { job: &job, shared: &theirs }.run();
            let mut state = lock(&theirs.state);
            match result {
                Ok(()) => log::info!("{} in {:.1?}", state.report, since.elapsed()),
                Err(e) => state.failed = Some(e),
            }
            drop(state);
            job.bar.finish_and_clear();
            theirs.finished.store(true, Ordering::Release);
        };
        let spawned = std::thread::Builder::new().name("pin".into()).spawn(work);
        let thread = spawned.map_err(|source| Error::File {
            path: "thread".into(),
            action: "start",
            source,
        })?;
        Ok(Pins { shared, bar, thread: Some(thread) })
    }

    /// The tensors that became complete since the last call.
    pub fn take(&self) -> Result<Vec<(usize, Pinned)>> {
        let mut state = lock(&self.shared.state);
        match state.failed.take() {
            Some(e) => Err(e),
            None => Ok(std::mem::take(&mut state.ready)),
        }
    }

    /// Whether nothing more comes.
    pub fn is_finished(&self) -> bool {
        self.shared.finished.load(Ordering::Acquire)
    }

    /// Waits until nothing more comes.
    pub fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic there was reported; what it left undone goes through the ring.
            let _ = thread.join();
        }
    }

    /// How it pins.
    pub fn source(&self) -> HostSource {
        lock(&self.shared.state).report.source
    }

    /// What became of it, so far.
    pub fn report(&self) -> PinReport {
        // Asked first: what is finished does not change.
        let finished = self.is_finished();
        let report = lock(&self.shared.state).report.clone();
        match finished {
            true => report,
            false => PinReport { limit: Limit::Unfinished, ..report },
        }
    }

    /// Shows no more how far it is.
    pub fn hide_progress(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.wait();
    }
}

/// The thread's work.
struct Pinning<'a> {
    job: &'a PinJob,
    shared: &'a Shared,
}

/// A chunk after its first step.
enum Prepared {
    /// Pages to be imported.
    Pages(Arc<dyn HostPages>, Range<u64>),
    /// A buffer to be filled.
    Empty(Buffer),
}

/// A copy of file pages, for a CPU that plays GPU: nothing pins pages for it, so they are gone when the
/// file is cut short, and its threads block the signal that then comes (Mesa's `u_thread_create`), which
/// ends the process.
fn copied(mapping: &PrivateMapping, range: &Range<u64>) -> Result<Arena> {
    let bytes = range.end - range.start;
    let mut arena = Arena::new("copies of the file's pages", bytes)?;
    mapping.read(range.start, &mut arena.bytes_mut()[..bytes as usize])?;
    Ok(arena)
}

impl Pinning<'_> {
    fn run(&self) -> Result<()> {
        let job = self.job;
        let files: Vec<FileTensor> = job.tensors.iter().map(|t| t.file).collect();
        let files = &files[..within(files.iter().map(FileTensor::bytes), job.budget.bytes)];
        let limits = &job.device.info().limits;
        // Imports are of whole pages; their limit is a multiple of them.
        let limit = match job.source {
            HostSource::Mmap | HostSource::Arena => limits.import_bytes(),
            _ => limits.allocated_buffer_bytes(),
        };
        let limit = PIN_CHUNK_BYTES.min(limit);
        let mappings = match self.mappings() {
            Ok(mappings) => mappings,
            Err(e) => return self.refused(e),
        };
        let mut plan = match job.source {
            HostSource::Mmap => {
                let page = limits.import_alignment.max(1);
                let mapped: Vec<u64> = mappings.iter().map(|m| m.bytes().len() as u64).collect();
                ChunkPlan::pages(files, page, limit, &mapped)
            }
            _ => ChunkPlan::reads(files, limit),
        };
        // With whole pages and gaps it may be more than the tensors alone.
        plan.chunks.truncate(within(plan.chunks.iter().map(|c| c.bytes), job.budget.bytes));
        self.pin_all(&plan, &mappings)
    }

    /// The files' pages, if these are to be imported.
    fn mappings(&self) -> Result<Vec<Arc<PrivateMapping>>> {
        match self.job.source {
            HostSource::Mmap => {
                (0..self.job.gguf.parts().len()).map(|i| self.job.gguf.map_private(i)).collect()
            }
            _ => Ok(Vec::new()),
        }
    }

    fn pin_all(&self, plan: &ChunkPlan, mappings: &[Arc<PrivateMapping>]) -> Result<()> {
        let mut buffers: Vec<Buffer> = Vec::new();
        let prepare = |i: usize| plan.chunks.get(i).map(|c| self.prepare(c, mappings));
        let mut next = prepare(0);
        while let Some(prepared) = next {
            if self.shared.stop.load(Ordering::Acquire) {
                return Ok(());
            }
            let index = buffers.len();
            let chunk = &plan.chunks[index];
            let (buffer, after) = rayon::join(
                || prepared.and_then(|prepared| self.finish(chunk, index, prepared)),
                || prepare(index + 1),
            );
            match buffer {
                Ok(buffer) => buffers.push(buffer),
                Err(e) => return self.refused(e),
            }
            next = after;
            for tensor in plan.completed_by(buffers.len()) {
                match self.pinned(tensor, plan, &buffers) {
                    Ok(pinned) => self.publish(tensor, pinned),
                    Err(e) => return self.refused(e),
                }
            }
        }
        self.job.gguf.check()
    }

    /// Memory that is refused ends the pinning, and the ring does the rest; a file that cannot be read
    /// ends the run.
    fn refused(&self, e: Error) -> Result<()> {
        match e {
            Error::File { .. } | Error::Gguf { .. } => Err(e),
            e => {
                log::debug!("pinning stopped: {e}");
                let memlock_bytes = self.job.memlock_bytes;
                lock(&self.shared.state).report.limit = Limit::Refused { memlock_bytes };
                Ok(())
            }
        }
    }

    fn publish(&self, tensor: usize, pinned: Pinned) {
        let bytes = self.job.tensors[tensor].file.bytes();
        self.job.bar.inc(bytes);
        let mut state = lock(&self.shared.state);
        state.report.pinned_bytes += bytes;
        state.ready.push((tensor, pinned));
    }

    /// The first step.
    fn prepare(&self, chunk: &Chunk, mappings: &[Arc<PrivateMapping>]) -> Result<Prepared> {
        let job = self.job;
        match &chunk.content {
            Content::Pages { part, range } => {
                let mapping = mappings[*part].clone();
                if job.device.info().kind == DeviceKind::Cpu {
                    let arena = copied(&mapping, range)?;
                    return Ok(Prepared::Pages(Arc::new(arena), 0..range.end - range.start));
                }
                mapping.populate(range.clone())?;
                Ok(Prepared::Pages(mapping, range.clone()))
            }
            Content::Reads(_) if job.source == HostSource::Host => {
                Buffer::new(&job.device, "experts.host", chunk.bytes, MemoryKind::HostRead)
                    .map(Prepared::Empty)
            }
            Content::Reads(reads) => {
                let mut arena = Arena::new("the experts' arena", chunk.bytes)?;
                self.read(reads, arena.bytes_mut())?;
                // Whole pages, but no more: a huge page may be more than the device imports at a time.
                let page = job.device.info().limits.import_alignment.max(1);
                Ok(Prepared::Pages(Arc::new(arena), 0..chunk.bytes.next_multiple_of(page)))
            }
        }
    }

    /// The second step.
    fn finish(&self, chunk: &Chunk, index: usize, prepared: Prepared) -> Result<Buffer> {
        match prepared {
            Prepared::Pages(pages, range) => {
                let name = format!("experts.{}.{index}", self.job.source);
                Buffer::import(&self.job.device, &name, &pages, range)
            }
            Prepared::Empty(buffer) => {
                if let Content::Reads(reads) = &chunk.content {
                    buffer.write_with(0, chunk.bytes, |memory| self.read(reads, memory))?;
                }
                Ok(buffer)
            }
        }
    }

    fn read(&self, reads: &[(usize, Range<u64>, u64)], memory: &mut [u8]) -> Result<()> {
        let gguf = &self.job.gguf;
        for (tensor, range, offset) in reads {
            let info = &gguf.tensors()[self.job.tensors[*tensor].tensor];
            gguf.read_parts(info, &[(range.clone(), *offset)], memory)?;
        }
        Ok(())
    }

    /// A tensor whose chunks are pinned. Matrices that no chunk has whole get a copy.
    fn pinned(&self, tensor: usize, plan: &ChunkPlan, chunks: &[Buffer]) -> Result<Pinned> {
        let t = &self.job.tensors[tensor];
        let pieces = &plan.pieces[tensor];
        let mut used: Vec<usize> = pieces.iter().flatten().map(|p| p.chunk).collect();
        used.dedup();
        let mut buffers: Vec<Buffer> = used.iter().map(|&c| chunks[c].clone()).collect();
        let missing = pieces.iter().filter(|p| p.is_none()).count() as u32;
        let (mut copies, sizes) = match missing {
            0 => (Vec::new(), Vec::new()),
            n => {
                let matrices = Matrices { n, bytes: t.file.matrix_bytes, phase: 0 };
                let limit = self.job.device.info().limits.allocated_buffer_bytes();
                let (mut pieces, sizes) = pack(&[matrices], limit);
                (pieces.pop().unwrap_or_default(), sizes)
            }
        };
        let n_chunks = buffers.len();
        for bytes in sizes {
            buffers.push(Buffer::new(
                &self.job.device,
                "experts.borders",
                bytes,
                MemoryKind::HostRead,
            )?);
        }
        copies.reverse();
        let info = &self.job.gguf.tensors()[t.tensor];
        let place = |(e, piece): (usize, &Option<Piece>)| -> Result<Piece> {
            if let Some(piece) = piece {
                let chunk = used.iter().position(|&c| c == piece.chunk).unwrap_or(0);
                return Ok(Piece { chunk, offset: piece.offset });
            }
            let copy = copies.pop().unwrap_or(Piece { chunk: 0, offset: 0 });
            let to = Piece { chunk: n_chunks + copy.chunk, offset: copy.offset };
            let at = e as u64 * t.file.matrix_bytes;
            buffers[to.chunk].write_with(to.offset, t.file.matrix_bytes, |memory| {
                self.job.gguf.read_at(info, at, memory)
            })?;
            Ok(to)
        };
        let pieces = pieces.iter().enumerate().map(place).collect::<Result<_>>()?;
        Ok(Pinned { buffers, pieces })
    }
}

/// How many sizes from the first on fit into a budget together.
fn within(sizes: impl Iterator<Item = u64>, budget_bytes: u64) -> usize {
    let sums = sizes.scan(0u64, |sum, bytes| {
        *sum = sum.saturating_add(bytes);
        Some(*sum)
    });
    sums.take_while(|&sum| sum <= budget_bytes).count()
}
