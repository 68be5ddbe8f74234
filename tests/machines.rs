//! Bad machines: little memory to lock, to use or to address, files in odd places, of odd layout, or that
//! change while they are used. The program gives the same text and logits as on a good one, or ends in
//! one line.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;

use common::gguf_builder::GgufBuilder;
use common::outcome::{End, Expected, Way, demo, expected_of_demo, run_demo};
use common::program::{Ran, command, finish};
use rayon::prelude::*;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tempfile::TempDir;
use vkmoe::gguf::write::Head;
use vkmoe::gguf::{Gguf, Value};
use vkmoe::progress::hidden_bar;
use vkmoe::stream::options::HostSource::{self, Arena, Host, Mmap, Ring};
use vkmoe::synth::file::{Existing, write};
use vkmoe::synth::presets::{Shape, find};
use vkmoe::synth::{Plan, Synth};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

// ---------------------------------------------------------------- helpers

const BY_TRIAL: Way = Way { source: None, slots: None };

/// The four sources, each with slots or without, and the choice by trial.
const WAYS: [Way; 5] = [
    BY_TRIAL,
    Way { source: Some(Mmap), slots: Some(3) },
    Way { source: Some(Arena), slots: None },
    Way { source: Some(Host), slots: Some(3) },
    Way { source: Some(Ring), slots: Some(3) },
];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A copy of the demo model.
fn demo_in(folder: &Path) -> PathBuf {
    let path = folder.join("demo.gguf");
    fs::copy("assets/demo-q4_k_m.gguf", &path).unwrap();
    path
}

/// Flags for a model and a way to the device.
fn flags(model: &Path, way: Way) -> Vec<String> {
    [vec!["-m".to_owned(), text(model).to_owned()], way.args()].concat()
}

/// The same command, begun by another program, which has arguments of its own.
fn begun_by(program: &str, args: &[&str], command: &Command) -> Command {
    let mut begun = Command::new(program);
    begun.args(args).arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => begun.env(name, value),
            None => begun.env_remove(name),
        };
    }
    begun
}

/// The same command, begun by a shell in which `script` comes first; `$1` is `argument`.
fn after_script(script: &str, argument: &str, command: &Command) -> Command {
    let script = format!("{script} || exit 99; shift; exec \"$@\"");
    begun_by("sh", &["-c", &script, "sh", argument], command)
}

/// What is not tried, and why, for whoever reads the log.
fn skip(what: &str) {
    eprintln!("SKIPPED: {what}");
}

/// A model with large experts and little else.
fn large_experts(n_layer: u32, n_expert: u32, n_ff_exp: u32) -> Plan {
    let synth = Synth::new(find("tiny").unwrap(), None, None, 7);
    let shape = Shape { n_layer, n_expert, n_ff_exp, ..synth.shape };
    Synth { shape, ..synth }.plan()
}

fn write_model(plan: &Plan, folder: &Path) -> PathBuf {
    let path = folder.join("large.gguf");
    write(plan, &path, Existing::Keep, &hidden_bar("", 0), &AtomicBool::new(false)).unwrap();
    path
}

/// A few tokens of a model of random weights.
fn run_large(model: &Path, way: Way, more: &[&str]) -> Command {
    let fixed = ["run", "--raw", "A few words.", "-n", "3", "--ignore-eos", "--temp", "0"];
    let sizes = ["--logits-hash", "-c", "64", "-ub", "8"];
    let flags = flags(model, way);
    let flags = flags.iter().map(String::as_str).chain(more.iter().copied());
    let mut command = command(&fixed.into_iter().chain(sizes).chain(flags).collect::<Vec<_>>());
    command.env("RUST_LOG", "vkmoe=info");
    command
}

// ---------------------------------------------------------------- limits

#[test]
fn a_small_limit_of_locked_memory_changes_nothing() {
    for way in WAYS {
        let plain = demo(&way.args(), "", "error");
        let ran = finish(after_script("ulimit -l $1", "64", &plain));
        assert_eq!(ran.end(expected_of_demo(), &way.to_string()), End::Same);
    }
    // A driver that counts pinned pages against it: the line says what to look at.
    let plain = demo(&WAYS[2].args(), "max-buffer=384KiB,max-imports=5", "vkmoe=info");
    let ran = finish(after_script("ulimit -l $1", "64", &plain));
    assert_eq!(ran.end(expected_of_demo(), "few imports"), End::Same);
    let line = "the driver, which took no more (locked memory, `ulimit -l`: 64.0 KiB)";
    assert!(ran.err.contains(line), "{}", ran.err);
}

/// Where a process has little memory.
enum Confined {
    /// A control group below that of this process; gone when dropped.
    Group(PathBuf),
    /// A scope of systemd's, where only that may make groups: `MemoryMax=…`.
    Scope(String),
}

impl Confined {
    /// `None`: this process may make none.
    fn new(limit_bytes: u64) -> Option<Confined> {
        Self::group(limit_bytes).or_else(|| {
            let scope = Confined::Scope(format!("MemoryMax={limit_bytes}"));
            let tried = scope.command(&Command::new("true")).output();
            tried.is_ok_and(|output| output.status.success()).then_some(scope)
        })
    }

    fn group(limit_bytes: u64) -> Option<Confined> {
        let (parent, limit) = parent_group()?;
        let path = parent.join(format!("vkmoe-test-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        let group = Confined::Group(path.clone());
        let limit = File::options().write(true).open(path.join(limit)).ok();
        limit?.write_all_at(limit_bytes.to_string().as_bytes(), 0).ok()?;
        Some(group)
    }

    fn command(&self, command: &Command) -> Command {
        match self {
            Confined::Group(path) => {
                after_script("echo $$ > \"$1\"/cgroup.procs", text(path), command)
            }
            Confined::Scope(limit) => {
                begun_by("systemd-run", &["--scope", "--quiet", "-p", limit], command)
            }
        }
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        let Confined::Group(path) = self else { return };
        // A process that ended is in it for a moment longer.
        for _ in 0..100 {
            if fs::remove_dir(&path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The control group of this process, and the file for the limit of a group below it.
fn parent_group() -> Option<(PathBuf, &'static str)> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let of = |controller: &str| {
        groups.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(controller))
    };
    let (root, group, limit) = match of("memory:/") {
        Some(group) => ("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"),
        None => ("/sys/fs/cgroup", of(":/")?, "memory.max"),
    };
    Some((Path::new(root).join(group), limit))
}

/// A model that is larger than the memory that this process may use: a part of it is pinned, and the
/// line says why no more is.
#[test]
fn a_control_group_smaller_than_the_model_limits_what_is_pinned() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_model(&large_experts(17, 128, 512), folder.path());
    let limit = 400 * MIB;
    assert!(fs::metadata(&model).unwrap().len() > limit + 40 * MIB);
    let Some(confined) = Confined::new(limit) else {
        return skip("a control group below the model's size: none can be made here");
    };
    let expected = Expected::from(finish(run_large(&model, WAYS[4], &[])));
    for way in WAYS {
        let ran = finish(confined.command(&run_large(&model, way, &[])));
        assert_eq!(ran.end(&expected, &way.to_string()), End::Same);
        let pinned = ran.err.lines().find(|line| line.contains("pinned "));
        match pinned {
            Some(line) => {
                assert!(line.contains("over the limit set by the control group "), "{line}")
            }
            None => assert_eq!(way.source, Some(Ring), "{}", ran.err),
        }
    }
}

/// More address space than there is: one line about the file if it cannot be mapped at all; if only its
/// second mapping cannot be had, the one for imports, the experts go another way.
#[test]
fn a_limit_of_address_space_is_told_or_gone_around() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse.gguf");
    // All weights are zeros, on no disk.
    let plan = large_experts(4, 256, 8192);
    let head = Head::new(&plan.keys, &plan.tensors);
    let file = File::create(&path).unwrap();
    file.write_all_at(&head.bytes, 0).unwrap();
    file.set_len(head.file_bytes).unwrap();
    let file_mib = head.file_bytes / MIB;
    assert!(file_mib > 3000, "{file_mib}");
    let within = |mib: u64, way: Way| {
        let mut plain = run_large(&path, way, &["--pin-max-mib", "8"]);
        plain.env("RUST_LOG", "error");
        finish(after_script("ulimit -v $1", &(mib * 1024).to_string(), &plain))
    };
    within(file_mib - 500, BY_TRIAL).failed(&["sparse.gguf: cannot map: "]);
    let ring = Way { source: Some(Ring), slots: None };
    let expected = Expected::from(finish(run_large(&path, ring, &[])));
    let room = 2 * file_mib + 1000;
    for way in [BY_TRIAL, ring] {
        assert_eq!(within(room, way).end(&expected, &way.to_string()), End::Same);
    }
    // By its flag if the trial fails; else nothing is pinned.
    let mmap = Way { source: Some(Mmap), slots: None };
    if let End::Failed(line) = within(room, mmap).end(&expected, "mmap") {
        assert!(line.starts_with("error: --host-source mmap: cannot get "), "{line}");
    }
}

/// The thread that pins is busy when the device is lost.
#[test]
fn a_device_lost_while_pages_are_pinned_ends_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_model(&large_experts(4, 64, 512), folder.path());
    let expected = Expected::from(finish(run_large(&model, WAYS[4], &[])));
    for source in [Mmap, Arena, Host] {
        for after in [4, 7, 12] {
            let way = Way { source: Some(source), slots: Some(3) };
            let mut command = run_large(&model, way, &[]);
            command.env("VKMOE_FAULTS", format!("device-lost-after={after}"));
            let what = format!("lost after {after}, {way}");
            let end = finish(command).end(&expected, &what);
            assert!(matches!(&end, End::Failed(line) if line.contains("device lost: ")), "{what}");
        }
    }
}

// ---------------------------------------------------------------- places

#[test]
fn a_model_in_memory_is_read_like_any_other() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return skip("a model on tmpfs: no /dev/shm");
    };
    let model = demo_in(folder.path());
    for way in WAYS {
        let ran = run_demo(&flags(&model, way), "", "error");
        assert_eq!(ran.end(expected_of_demo(), &way.to_string()), End::Same);
    }
}

#[test]
fn a_model_on_a_read_only_mount_is_read_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let model = demo_in(folder.path());
    // In a namespace of its own: the mount ends with the process.
    let script =
        "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && ! touch \"$1/x\" 2>&-";
    for way in WAYS {
        let plain = demo(&flags(&model, way), "", "error");
        let mounted = after_script(script, text(folder.path()), &plain);
        let outer = begun_by("unshare", &["--mount", "--propagation", "private"], &mounted);
        let ran = finish(outer);
        if ran.code == Some(99) || ran.err.starts_with("unshare") {
            return skip("a model on a read-only mount: this process may not mount");
        }
        assert_eq!(ran.end(expected_of_demo(), &way.to_string()), End::Same);
    }
}

// ---------------------------------------------------------------- layouts

/// The demo model with its tensors in another order, `shift` × 32 bytes further than a page's start, and
/// the experts one after the other without a gap.
fn reordered(folder: &Path, shift: u64) -> PathBuf {
    let gguf = Gguf::open(Path::new("assets/demo-q4_k_m.gguf")).unwrap();
    let keys = gguf.metadata().iter();
    let mut file =
        keys.fold(GgufBuilder::new(), |file, (name, value)| file.key(name, value.clone()));
    let is_expert = |name: &str| name.contains("_exps");
    // Against the order of use.
    let mut tensors: Vec<_> = gguf.tensors().iter().rev().collect();
    tensors.sort_by_key(|t| is_expert(&t.name));
    for t in tensors {
        file = file.tensor(&t.name, t.ty, &t.shape, gguf.bytes(t).to_vec());
    }
    let path = file.write(&folder.join(format!("{shift}.gguf")));
    let written = Gguf::open(&path).unwrap();
    let experts = written.tensors().iter().filter(|t| is_expert(&t.name));
    let first = experts.map(|t| t.offset).min().unwrap();
    // A key of 12 bytes is 32 longer than its text.
    let padding = (shift * 32 + PAGE - 32 + PAGE - first % PAGE) % PAGE;
    file.key("test.padding", Value::String("x".repeat(padding as usize))).write(&path)
}

/// Experts at odd multiples of 32 bytes, two in a page, and over the borders of chunks.
#[test]
fn odd_offsets_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let models: Vec<PathBuf> = [1, 77, 127].iter().map(|&n| reordered(folder.path(), n)).collect();
    for model in &models {
        let gguf = Gguf::open(model).unwrap();
        let experts = gguf.tensors().iter().filter(|t| t.name.contains("_exps"));
        let mut places: Vec<(u64, u64)> = experts.map(|t| (t.offset, t.offset + t.bytes)).collect();
        places.sort_unstable();
        assert!(places.iter().all(|(start, _)| start % 64 == 32), "{places:?}");
        assert!(places.windows(2).all(|w| w[0].1 == w[1].0 && w[0].1 % PAGE != 0), "{places:?}");
    }
    let faults = ["", "max-buffer=384KiB", "max-buffer=332KiB,import-alignment=64"];
    let runs: Vec<_> = models.iter().flat_map(|m| faults.map(|f| (m, f))).collect();
    let runs = runs.into_iter().flat_map(|(m, f)| WAYS[1..].iter().map(move |&way| (m, f, way)));
    runs.collect::<Vec<_>>().into_par_iter().for_each(|(model, faults, way)| {
        let what = format!("{}, {faults}, {way}", model.display());
        let ran = run_demo(&flags(model, way), faults, "error");
        assert_eq!(ran.end(expected_of_demo(), &what), End::Same, "{what}");
    });
}

// ---------------------------------------------------------------- files that change

/// What happens to a model in use.
type Change = fn(&Path);

fn truncate(path: &Path) {
    File::options().write(true).open(path).unwrap().set_len(300_000).unwrap();
}

fn empty(path: &Path) {
    File::create(path).unwrap();
}

fn overwrite(path: &Path) {
    let bytes = fs::metadata(path).unwrap().len();
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&vec![0x5a; bytes as usize - 400_000], 400_000).unwrap();
}

fn exchange(path: &Path) {
    let other = path.with_extension("new");
    fs::write(&other, vec![0x5a; 5 << 20]).unwrap();
    fs::rename(other, path).unwrap();
}

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

/// Runs on until the first byte of the answer; then the file changes.
fn changed_amid(model: &Path, way: Way, change: Change) -> Ran {
    let more = ["-n".to_owned(), "40".to_owned()];
    let mut command = demo(&[flags(model, way), more.to_vec()].concat(), "", "error");
    let mut child: Child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    change(model);
    let mut ran = Ran::from(child.wait_with_output().unwrap());
    ran.out.insert(0, char::from(first[0]));
    ran
}

/// In decode, by what is read: the file's pages and the ring notice; what was copied at start does not
/// need the file any more, and a file by another name is still there.
#[test]
fn a_file_that_changes_while_it_is_used_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let expected = {
        let model = demo_in(folder.path());
        Expected::from(changed_amid(&model, Way { source: Some(Ring), slots: Some(3) }, |_| {}))
    };
    let pages = Way { source: Some(Mmap), slots: None };
    let changes: [(&str, Change, bool); 5] = [
        ("truncated", truncate, true),
        ("emptied", empty, true),
        ("overwritten", overwrite, true),
        ("exchanged", exchange, false),
        ("removed", remove, false),
    ];
    for (name, change, is_told) in changes {
        for way in [pages, WAYS[2], WAYS[3], WAYS[4]] {
            let model = demo_in(folder.path());
            let what = format!("{name}, {way}");
            let end = changed_amid(&model, way, change).end(&expected, &what);
            let needs_file = matches!(way.source, Some(Mmap | Ring));
            match end {
                End::Same => assert!(!(is_told && needs_file), "{what} and not told"),
                End::Failed(line) => {
                    assert!(is_told && needs_file, "{what}: {line}");
                    assert!(line.contains("demo.gguf: file: it "), "{what}: {line}");
                    assert!(line.contains(" while in use"), "{what}: {line}");
                }
            }
        }
    }
}

/// While it is loaded, pinned and streamed, at many moments: the same text or one line, never a signal.
#[test]
fn a_file_that_is_cut_at_any_time_ends_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let plan = large_experts(4, 64, 512);
    let model = write_model(&plan, folder.path());
    let expected = Expected::from(finish(run_large(&model, WAYS[4], &[])));
    let sources = [Mmap, Arena, Host, Ring];
    let delays_ms = [0, 20, 40, 60, 80, 110, 150, 200];
    let cut = |source: HostSource, delay_ms: u64, n: usize| {
        let copy: TempDir = tempfile::tempdir().unwrap();
        let path = copy.path().join("cut.gguf");
        fs::copy(&model, &path).unwrap();
        let way = Way { source: Some(source), slots: Some(3 * (n as u32 % 2)) };
        let mut command = run_large(&path, way, &[]);
        command.env("RUST_LOG", "error").stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay_ms));
        truncate(&path);
        let ran = Ran::from(child.wait_with_output().unwrap());
        ran.end(&expected, &format!("cut after {delay_ms} ms, {way}"))
    };
    let told = sources.iter().flat_map(|&source| {
        delays_ms.iter().enumerate().map(move |(n, &delay_ms)| (source, delay_ms, n))
    });
    let told: Vec<End> = told.map(|(source, delay_ms, n)| cut(source, delay_ms, n)).collect();
    let lines = told.iter().filter(|end| **end != End::Same).count();
    assert!(lines > 4, "{told:?}");
}
