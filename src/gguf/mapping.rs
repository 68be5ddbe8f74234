//! Maps a file into memory for reading, and survives the file's shrinking meanwhile.
//!
//! Reading a mapped page that the file no longer reaches raises SIGBUS, which would end the process
//! without a word. Instead: the first mapping installs a handler. It looks the fault's address up in
//! a table of our mappings; finds it there, puts zero pages from the fault to the mapping's end, notes
//! in the table that the mapping is damaged, and returns, so that the read goes on with zeros.
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
//! Importing the pages into Vulkan needs `MAP_PRIVATE` with write access; that mapping belongs into
//! this file as a second constructor next to [`Mapping::open`], and its slot in the same table.

#![allow(unsafe_code, reason = "mapping a file and handling its SIGBUS are unsafe by nature")]

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A file, mapped for reading.
#[derive(Debug)]
pub(super) struct Mapping {
    // Dropped in this order: the slot must be free before the addresses are.
    guard: guard::Guard,
    map: memmap2::Mmap,
    file: File,
    path: PathBuf,
}

impl Mapping {
    /// Maps a regular file (anything else could block, or have no length).
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = open_regular(path).map_err(file_error(path, "open"))?;
        // SAFETY: another process may write the file while we read it. The parser copies what it
        // decides on, tensors are numbers of any bits, and a shorter file is the guard's business.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(file_error(path, "map"))?;
        let guard = guard::Guard::new(&map).map_err(file_error(path, "map"))?;
        Ok(Mapping { guard, map, file, path: path.to_owned() })
    }

    /// The whole file. Zeros where it has shrunk since: see [`check`](Self::check).
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// An error if bytes handed out may not be the file's: it has changed its length, or a page could
    /// not be read.
    pub(super) fn check(&self) -> Result<()> {
        let then = self.map.len() as u64;
        let now = self.file.metadata().map_err(file_error(&self.path, "examine"))?.len();
        let problem = if now != then {
            format!("it changed from {then} to {now} bytes while in use")
        } else if self.guard.damaged() {
            "a page of it could not be read while in use".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::Gguf { path: self.path.clone(), place: "file".into(), problem })
    }
}

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
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::{Mutex, OnceLock, PoisonError};

    use libc::{c_int, c_void, siginfo_t};

    /// Files mapped at once; the largest split models have a few hundred parts.
    const MAX_MAPPINGS: usize = 4096;

    struct Slot {
        start: AtomicUsize,
        end: AtomicUsize,
        damaged: AtomicBool,
    }

    static SLOTS: [Slot; MAX_MAPPINGS] = [const {
        Slot {
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            damaged: AtomicBool::new(false),
        }
    }; MAX_MAPPINGS];
    /// Held while slots are filled; the handler never takes it.
    static WRITERS: Mutex<()> = Mutex::new(());
    static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);
    /// What SIGBUS did before us.
    static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

    /// A mapping's slot in the table, freed on drop.
    #[derive(Debug)]
    pub(super) struct Guard {
        slot: usize,
    }

    impl Guard {
        /// Protects a mapping that outlives the guard.
        pub(super) fn new(map: &[u8]) -> io::Result<Self> {
            let _writer = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
            install()?;
            let slot = SLOTS
                .iter()
                .position(|slot| slot.end.load(Ordering::Relaxed) == 0)
                .ok_or_else(|| io::Error::other(format!("{MAX_MAPPINGS} files are mapped")))?;
            let range = map.as_ptr_range();
            SLOTS[slot].damaged.store(false, Ordering::Relaxed);
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
                libc::PROT_READ,
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

    #[derive(Debug)]
    pub(super) struct Guard;

    impl Guard {
        pub(super) fn new(_map: &[u8]) -> std::io::Result<Self> {
            Ok(Guard)
        }

        pub(super) fn damaged(&self) -> bool {
            false
        }
    }
}
