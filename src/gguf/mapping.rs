//! Maps a file into memory, reads it in parallel, and survives the file's shrinking meanwhile.
//!
//! There are two mappings. [`Mapping`] is for reading. [`PrivateMapping`] is for devices to import: they
//! want pages that the process could write (`MAP_PRIVATE`), and pinning turns each page into a copy of
//! its own, so that the page cache behind it is free to go. It begins at a multiple of the largest import
//! alignment and is padded with zeros to one, so that any tensor's range can be rounded outward.
//!
//! Reading a mapped page that the file no longer reaches raises SIGBUS, which would end the process
//! without a word. Instead: the first mapping installs a handler. It looks the fault's address up in
//! a table of our mappings; finds it there, puts zero pages from the fault to the mapping's end, notes
//! in the table that the mapping is damaged, and returns, so that the access goes on with zeros.
//! Whoever read calls [`Mapping::check`] before trusting the result. Covering the whole rest means one
//! signal for a cut-off file instead of one per page. A read error of the disk raises SIGBUS as well
//! and ends the same way. Faults elsewhere go to the handler that was there before, or kill the
//! process as they always did. (A system call that reads such a page fails with EFAULT; no signal.)
//!
//! The handler runs between any two instructions of any thread. It takes no lock, allocates nothing
//! and calls only `mmap`, a plain system call, and on its way out `sigaction` and `raise`. The table
//! is an array of fixed size; writers hold a mutex, the handler only loads atomics. A slot in use has
//! `end != 0`; it is filled `start` first, `end` last, and emptied `end` first, before the unmapping.
//!
//! Elsewhere than on Unix, a mapped file cannot be cut short (Windows refuses); the length is checked.
//!
//! Positioned reads need no mapping, and no page fault for each page: filling memory of our own from a
//! file goes that way.

#![allow(unsafe_code, reason = "mapping a file and handling its SIGBUS are unsafe by nature")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use memmap2::MmapMut;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::vk::HostPages;

/// What the start and the length of a private mapping are multiples of: the largest alignment that
/// Vulkan allows a driver to ask for (`minImportedHostPointerAlignment`).
const IMPORT_ALIGN: usize = 64 << 10;
/// Pages are copied in pieces of this size, each by one thread: small enough for all threads to have
/// work, large enough that the calls do not count.
const POPULATE_BYTES: usize = 16 << 20;

/// A file, mapped for reading.
#[derive(Debug)]
pub(super) struct Mapping {
    // Dropped in this order: the slot must be free before the addresses are.
    guard: guard::Guard,
    map: memmap2::Mmap,
    modified: Option<SystemTime>,
    file: Arc<File>,
    path: PathBuf,
}

impl Mapping {
    /// Maps a regular file (anything else could block, or have no length).
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = open_regular(path).map_err(file_error(path, "open"))?;
        let modified = file.metadata().map_err(file_error(path, "examine"))?.modified().ok();
        // SAFETY: another process may write the file while we read it. The parser copies what it
        // decides on, tensors are numbers of any bits, and a shorter file is the guard's business.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(file_error(path, "map"))?;
        let guard =
            guard::Guard::new(&map, guard::Access::Read).map_err(file_error(path, "map"))?;
        Ok(Mapping { guard, map, modified, file: Arc::new(file), path: path.to_owned() })
    }

    /// The whole file. Zeros where it has shrunk since: see [`check`](Self::check).
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// An error if bytes handed out may not be the file's as it was: it has changed its length or was
    /// written to, or a page could not be read.
    pub(super) fn check(&self) -> Result<()> {
        check(&self.file, &self.path, (self.map.len(), self.modified), &self.guard)
    }

    /// Fills `to` with the file's bytes from `offset` on.
    pub(super) fn read_at(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        read_exact_at(&self.file, to, offset).map_err(|source| {
            // That the file shrank explains more than that it ended.
            let shrank = self.check().err();
            shrank.unwrap_or_else(|| file_error(&self.path, "read")(source))
        })
    }

    /// Tells the system that the file will be read in order, and that range soon.
    pub(super) fn will_read(&self, offset: u64, bytes: u64) {
        read_ahead(&self.file, offset..offset.saturating_add(bytes));
    }

    /// Maps the file once more, for import.
    pub(super) fn map_private(&self) -> Result<PrivateMapping> {
        let bytes = self.map.len();
        // No address space is no fault of the file: it can still be read.
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::OutOfMemory => {
                let what = format!("mapping {} for import", self.path.display());
                Error::HostMemory { what, bytes: bytes as u64, source }
            }
            _ => file_error(&self.path, "map for import")(source),
        };
        let window = Window::new(&self.file, bytes).map_err(failed)?;
        let file_pages = &window.bytes()[..bytes];
        let guard = guard::Guard::new(file_pages, guard::Access::Write).map_err(failed)?;
        let (file, path) = (self.file.clone(), self.path.clone());
        let (file_bytes, modified) = (self.map.len(), self.modified);
        Ok(PrivateMapping { guard, window, file_bytes, modified, file, path })
    }
}

/// A file, mapped so that a device may import its pages: private and writable. Byte `i` is byte `i` of
/// the file; zeros follow the file's end up to a multiple of 64 KiB. Nothing writes to it.
#[derive(Debug)]
pub struct PrivateMapping {
    // Dropped in this order: the slot must be free before the addresses are.
    guard: guard::Guard,
    window: Window,
    file_bytes: usize,
    modified: Option<SystemTime>,
    file: Arc<File>,
    path: PathBuf,
}

impl PrivateMapping {
    /// Length of the file; [`HostPages::bytes`] may be longer.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes as u64
    }

    /// Makes the pages of a range the process's own, with all threads of the pool. Importing does it as
    /// well, but with one thread: 0.4 s/GiB (NVIDIA).
    pub fn populate(&self, range: Range<u64>) -> Result<()> {
        let end = usize::try_from(range.end).unwrap_or(usize::MAX).min(self.file_bytes);
        let start =
            usize::try_from(range.start).unwrap_or(usize::MAX) / IMPORT_ALIGN * IMPORT_ALIGN;
        let pieces: Vec<Range<usize>> = (start..end)
            .step_by(POPULATE_BYTES)
            .map(|at| at..(at + POPULATE_BYTES).min(end))
            .collect();
        pieces.into_par_iter().try_for_each(|piece| {
            read_ahead(&self.file, piece.start as u64..piece.end as u64);
            self.window.populate(piece).map_err(file_error(&self.path, "copy pages of"))
        })?;
        self.check()
    }

    /// Fills `to` with bytes from `start` on, those of the file and the zeros behind it, by all threads
    /// of the pool: a copy that no change of the file reaches.
    pub fn read(&self, start: u64, to: &mut [u8]) -> Result<()> {
        let end = start.saturating_add(to.len() as u64).min(self.file_bytes());
        let (of_file, behind) = to.split_at_mut(end.saturating_sub(start) as usize);
        behind.fill(0);
        let starts = (start..end).step_by(POPULATE_BYTES).collect::<Vec<_>>();
        let pieces = of_file.par_chunks_mut(POPULATE_BYTES).zip(starts);
        let failed = |source| {
            let shrank = self.check().err();
            shrank.unwrap_or_else(|| file_error(&self.path, "read")(source))
        };
        pieces.try_for_each(|(to, at)| read_exact_at(&self.file, to, at).map_err(failed))?;
        self.check()
    }

    /// As [`Gguf::check`](super::Gguf::check), for what was read through this mapping.
    pub fn check(&self) -> Result<()> {
        check(&self.file, &self.path, (self.file_bytes, self.modified), &self.guard)
    }
}

// SAFETY: the window is private, readable and writable; nothing moves or unmaps it before the drop, and
// the SIGBUS handler keeps its pages so where it replaces them.
unsafe impl HostPages for PrivateMapping {
    fn bytes(&self) -> &[u8] {
        self.window.bytes()
    }
}

/// Address space of a private mapping: a file, then zeros, from one multiple of [`IMPORT_ALIGN`] to
/// another.
#[derive(Debug)]
struct Window {
    map: MmapMut,
    /// Where in `map`.
    start: usize,
    bytes: usize,
}

impl Window {
    /// Reserves zeros with room to align, and puts the file over them. No swap is reserved: the file
    /// may be larger than all memory, and only as much as is pinned gets copied.
    #[cfg(unix)]
    fn new(file: &File, file_bytes: usize) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        let bytes = file_bytes.checked_next_multiple_of(IMPORT_ALIGN);
        let whole = bytes.and_then(|bytes| bytes.checked_add(IMPORT_ALIGN));
        let (Some(bytes), Some(whole)) = (bytes, whole) else {
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let mut map = memmap2::MmapOptions::new().len(whole).no_reserve_swap().map_anon()?;
        let address = map.as_ptr() as usize;
        let start = address.next_multiple_of(IMPORT_ALIGN) - address;
        // SAFETY: `start` is less than the alignment that `whole` has room for.
        let target = unsafe { map.as_mut_ptr().add(start) };
        // SAFETY: the pages from `target` on for `file_bytes` lie in `map`, which is ours alone and
        // nobody looks into yet. That another process may write the file is as in `Mapping::open`.
        let mapped = unsafe {
            libc::mmap(
                target.cast(),
                file_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        match mapped == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(Window { map, start, bytes }),
        }
    }

    /// A view of the file, which the system aligns to 64 KiB and fills to a whole page.
    #[cfg(not(unix))]
    fn new(file: &File, file_bytes: usize) -> io::Result<Self> {
        // SAFETY: as in `Mapping::open`; the file cannot shrink.
        let map = unsafe { memmap2::MmapOptions::new().len(file_bytes).map_copy(file) }?;
        Ok(Window { map, start: 0, bytes: file_bytes.next_multiple_of(PAGE_BYTES) })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: see the constructors: `start` lies in the mapping ...
        let start = unsafe { self.map.as_ptr().add(self.start) };
        // SAFETY: ... and `bytes` from there on are mapped as long as `map` lives.
        unsafe { std::slice::from_raw_parts(start, self.bytes) }
    }

    /// Has the system copy the pages of a range.
    #[cfg(target_os = "linux")]
    fn populate(&self, range: Range<usize>) -> io::Result<()> {
        let (start, len) = (self.start + range.start, range.len());
        match self.map.advise_range(memmap2::Advice::PopulateWrite, start, len) {
            // Before Linux 5.14, or where a fault will explain itself: a file that shrank.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EFAULT)) => {
                self.touch(range);
                Ok(())
            }
            other => other,
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn populate(&self, range: Range<usize>) -> io::Result<()> {
        self.touch(range);
        Ok(())
    }

    /// Writes a byte of every page, the one that is there.
    fn touch(&self, range: Range<usize>) {
        for at in range.step_by(PAGE_BYTES) {
            // SAFETY: `at` lies in the window, which lies in the mapping.
            let byte = unsafe { self.map.as_ptr().add(self.start + at) }.cast_mut();
            // SAFETY: the page is mapped and readable.
            let value = unsafe { byte.read_volatile() };
            // SAFETY: the page is private and writable; nobody else writes it, and no value changes.
            unsafe { byte.write_volatile(value) };
        }
    }
}

/// No page is smaller.
const PAGE_BYTES: usize = 4096;

/// The error of [`Mapping::check`], for a file that had `then` bytes and was `modified` then. Where the
/// file system keeps no times, only the length can tell.
fn check(
    file: &File,
    path: &Path,
    (then, modified): (usize, Option<SystemTime>),
    guard: &guard::Guard,
) -> Result<()> {
    let facts = file.metadata().map_err(file_error(path, "examine"))?;
    let now = facts.len();
    let problem = if now != then as u64 {
        format!("it changed from {then} to {now} bytes while in use")
    } else if guard.damaged() {
        "a page of it could not be read while in use".to_owned()
    } else if facts.modified().ok() != modified {
        "it was written to while in use".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::Gguf { path: path.to_owned(), place: "file".into(), problem })
}

#[cfg(unix)]
fn read_exact_at(file: &File, to: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut to: &mut [u8], mut offset: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !to.is_empty() {
        match file.seek_read(to, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                to = &mut to[n..];
                offset += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Asks for a range to be read into the page cache. What cannot be asked is read when it is needed.
#[cfg(target_os = "linux")]
fn read_ahead(file: &File, range: Range<u64>) {
    use std::os::fd::AsRawFd;
    /// The kernel cuts longer requests short (`force_page_cache_ra`).
    const STEP_BYTES: u64 = 1 << 20;
    let advise = |offset: u64, len: u64, advice| {
        if let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) {
            // SAFETY: the descriptor is open; a call that only advises touches no memory of ours.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, advice) };
        }
    };
    advise(0, 0, libc::POSIX_FADV_SEQUENTIAL);
    for start in range.clone().step_by(STEP_BYTES as usize) {
        advise(start, STEP_BYTES.min(range.end - start), libc::POSIX_FADV_WILLNEED);
    }
}

#[cfg(not(target_os = "linux"))]
fn read_ahead(_file: &File, _range: Range<u64>) {}

fn open_regular(path: &Path) -> io::Result<File> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    File::open(path)
}

fn file_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { path, action, source }
}

#[cfg(unix)]
mod guard {
    //! The table of mappings and the SIGBUS handler that reads it.

    use std::io;
    use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
    use std::sync::{Mutex, OnceLock, PoisonError};

    use libc::{c_int, c_void, siginfo_t};

    /// Files mapped at once; the largest split models have a few hundred parts.
    const MAX_MAPPINGS: usize = 4096;

    struct Slot {
        start: AtomicUsize,
        end: AtomicUsize,
        /// Protection of the pages, and of the zeros that replace them.
        protection: AtomicI32,
        damaged: AtomicBool,
    }

    static SLOTS: [Slot; MAX_MAPPINGS] = [const {
        Slot {
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            protection: AtomicI32::new(libc::PROT_READ),
            damaged: AtomicBool::new(false),
        }
    }; MAX_MAPPINGS];
    /// Held while slots are filled; the handler never takes it.
    static WRITERS: Mutex<()> = Mutex::new(());
    static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);
    /// What SIGBUS did before us.
    static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

    /// What a mapping's pages allow.
    #[derive(Clone, Copy)]
    pub(super) enum Access {
        Read,
        /// Reading, too.
        Write,
    }

    impl Access {
        fn protection(self) -> c_int {
            match self {
                Access::Read => libc::PROT_READ,
                Access::Write => libc::PROT_READ | libc::PROT_WRITE,
            }
        }
    }

    /// A mapping's slot in the table, freed on drop.
    #[derive(Debug)]
    pub(super) struct Guard {
        slot: usize,
    }

    impl Guard {
        /// Protects a mapping that outlives the guard.
        pub(super) fn new(map: &[u8], access: Access) -> io::Result<Self> {
            let _writer = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
            install()?;
            let slot = SLOTS
                .iter()
                .position(|slot| slot.end.load(Ordering::Relaxed) == 0)
                .ok_or_else(|| io::Error::other(format!("{MAX_MAPPINGS} files are mapped")))?;
            let range = map.as_ptr_range();
            SLOTS[slot].damaged.store(false, Ordering::Relaxed);
            SLOTS[slot].protection.store(access.protection(), Ordering::Relaxed);
            SLOTS[slot].start.store(range.start as usize, Ordering::Release);
            SLOTS[slot].end.store(range.end as usize, Ordering::Release);
            Ok(Guard { slot })
        }

        /// Whether a fault was covered with zeros.
        pub(super) fn damaged(&self) -> bool {
            SLOTS[self.slot].damaged.load(Ordering::Acquire)
        }
    }

    impl Drop for Guard {
        fn drop(&mut self) {
            SLOTS[self.slot].end.store(0, Ordering::Release);
        }
    }

    /// Installs the handler, once. Called with [`WRITERS`] held.
    fn install() -> io::Result<()> {
        if PREVIOUS.get().is_some() {
            return Ok(());
        }
        // SAFETY: sysconf only reads.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        PAGE_BYTES.store(usize::try_from(page_bytes).unwrap_or(4096), Ordering::Relaxed);
        // Asked for first, so that the handler finds it from its first signal on.
        PREVIOUS.get_or_init(previous_action);
        let mut ours = default_action();
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_sigbus;
        ours.sa_sigaction = handler as usize;
        // On the alternative stack, where the runtime's own handler expects to be called.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `ours` is valid, and `on_sigbus` keeps to what a signal handler may do.
        if unsafe { libc::sigaction(libc::SIGBUS, &ours, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// The action now in force.
    fn previous_action() -> libc::sigaction {
        let mut action = default_action();
        // SAFETY: a null new action only asks; `action` is ours to write.
        unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut action) };
        action
    }

    fn default_action() -> libc::sigaction {
        // SAFETY: all zeros are a valid sigaction: SIG_DFL, no flags, an empty mask.
        unsafe { std::mem::zeroed() }
    }

    extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
        let facts = unsafe { &*info };
        let from_kernel = facts.si_code > 0;
        // SAFETY: for a signal sent by a process the value means nothing, and is not used.
        let address = unsafe { facts.si_addr() } as usize;
        if !(from_kernel && cover(address)) {
            pass_on(signal, info, context);
        }
    }

    /// Puts zeros from the page of `address` to the end of our mapping there, if there is one.
    fn cover(address: usize) -> bool {
        let page = address & !(PAGE_BYTES.load(Ordering::Relaxed) - 1);
        let Some((slot, end)) =
            SLOTS.iter().find_map(|slot| Some((slot, end_if_in(slot, address)?)))
        else {
            return false;
        };
        slot.damaged.store(true, Ordering::Release);
        // SAFETY: the pages from `page` to `end` are a mapping of ours: its owner, who is reading it
        // now, drops its Guard before unmapping. Its readers see other bytes, as when a file changes.
        let zeros = unsafe {
            libc::mmap(
                page as *mut c_void,
                end - page,
                slot.protection.load(Ordering::Relaxed),
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        zeros != libc::MAP_FAILED
    }

    /// The end of the slot's mapping, if the address lies in it. `end` is read twice: had the slot
    /// passed from one mapping to another in between, `start` could belong to either.
    fn end_if_in(slot: &Slot, address: usize) -> Option<usize> {
        let end = slot.end.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Acquire);
        let unchanged = end == slot.end.load(Ordering::Acquire);
        (unchanged && start <= address && address < end).then_some(end)
    }

    /// Not ours: what would have happened without us.
    fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        let previous = PREVIOUS.get();
        let handler = previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
        if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
            die(signal);
        } else if previous.is_some_and(|previous| previous.sa_flags & libc::SA_SIGINFO != 0) {
            // SAFETY: the flag says that the address is a function with these parameters.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        } else {
            // SAFETY: without the flag it is a function of the signal's number.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }

    /// Ends the process as the signal does by default: on return from the handler.
    fn die(signal: c_int) {
        // SAFETY: a valid signal and action; sigaction may be called in a handler.
        unsafe { libc::sigaction(signal, &default_action(), std::ptr::null_mut()) };
        // SAFETY: raise may be called in a handler.
        unsafe { libc::raise(signal) };
    }
}

#[cfg(not(unix))]
mod guard {
    //! Nothing to guard against.

    #[derive(Clone, Copy)]
    pub(super) enum Access {
        Read,
        Write,
    }

    #[derive(Debug)]
    pub(super) struct Guard;

    impl Guard {
        pub(super) fn new(_map: &[u8], _access: Access) -> std::io::Result<Self> {
            Ok(Guard)
        }

        pub(super) fn damaged(&self) -> bool {
            false
        }
    }
}
