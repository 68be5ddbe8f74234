//! Faults injected on purpose, so that tests meet what drivers do that no test machine has: lavapipe
//! imports any page, has one kind of memory, and never loses itself.
//!
//! The hidden variable `VKMOE_FAULTS` lists them, separated by commas; [`Instance::new`] reads it once.
//! Limits and extensions are changed as they are reported (`info`), so that everything above believes
//! them; refusals and losses happen where the driver would be called. A device without faults has no
//! state for them, and asks for it with one comparison with null.
//!
//! [`Instance::new`]: super::Instance::new

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ash::prelude::VkResult;
use ash::{ext, vk};

use super::arena::Arena;
use super::import::HostPages;
use super::info::{DeviceInfo, Heap};
use super::lanes::Lane;
use super::late::Late;
use crate::{Error, Result};

const VARIABLE: &str = "VKMOE_FAULTS";
/// Buffers whose names begin so are staging slots in the device's memory.
const SLOT_PREFIX: &str = "slot.";
/// And these the expert cache's.
const CACHE_PREFIX: &str = "cache.";

/// What goes wrong. The default: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Every import is refused.
    pub refuse_import: bool,
    /// Imports of pages of a file, copied or not, are refused, as amdgpu does.
    pub refuse_file_import: bool,
    /// Imports of pages that are not private and writable are refused, as NVIDIA's driver does.
    pub refuse_read_only_import: bool,
    /// After one refused import all later ones of the device are refused, too (NVIDIA).
    pub import_poisons: bool,
    /// Imports are accepted; the first submission that uses one loses the device (i915).
    pub import_fails_at_copy: bool,
    /// Imports are accepted, and the device reads zeros.
    pub import_reads_zeros: bool,
    /// A device takes so many imports; later ones are refused, as where locked memory runs out.
    pub max_imports: Option<u64>,
    /// The device does not know `VK_EXT_external_memory_host`.
    pub no_import_extension: bool,
    /// The device has one queue.
    pub one_queue: bool,
    /// No memory type is coherent.
    pub non_coherent: bool,
    /// Submissions of the copy lane start no earlier than something waits for them.
    pub late_copies: bool,
    /// Those of the compute lane, if the copy lane's are not.
    pub late_kernels: bool,
    /// Largest buffer, and largest allocation.
    pub max_buffer_bytes: Option<u64>,
    /// Largest range of a storage buffer binding.
    pub storage_range_bytes: Option<u64>,
    /// Alignment of imported memory.
    pub import_alignment_bytes: Option<u64>,
    /// After a device's budget was asked for once, it is so much smaller.
    pub budget_drops_bytes: Option<u64>,
    /// So many buffers of staging slots can be allocated in the device's memory at a time.
    pub max_slots: Option<u64>,
    /// A larger buffer of the expert cache cannot be allocated.
    pub max_cache_bytes: Option<u64>,
    /// This submission, counted from 1, loses the device.
    pub device_lost_after: Option<u64>,
}

type Switch = fn(&mut Faults) -> &mut bool;
type Number = fn(&mut Faults) -> &mut Option<u64>;

const SWITCHES: &[(&str, Switch)] = &[
    ("refuse-import", |f| &mut f.refuse_import),
    ("refuse-file-import", |f| &mut f.refuse_file_import),
    ("refuse-read-only-import", |f| &mut f.refuse_read_only_import),
    ("import-poisons", |f| &mut f.import_poisons),
    ("import-fails-at-copy", |f| &mut f.import_fails_at_copy),
    ("import-reads-zeros", |f| &mut f.import_reads_zeros),
    ("no-import-extension", |f| &mut f.no_import_extension),
    ("one-queue", |f| &mut f.one_queue),
    ("non-coherent", |f| &mut f.non_coherent),
    ("late-copies", |f| &mut f.late_copies),
    ("late-kernels", |f| &mut f.late_kernels),
];

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Name, bytes in one unit of the value, what the value may be, field. Bytes can also be given in KiB:
/// `max-buffer=384KiB`.
const NUMBERS: &[(&str, u64, Values, Number)] = &[
    ("max-buffer", MIB, Values::Positive, |f| &mut f.max_buffer_bytes),
    ("storage-range", MIB, Values::Positive, |f| &mut f.storage_range_bytes),
    ("import-alignment", KIB, Values::Alignment, |f| &mut f.import_alignment_bytes),
    ("max-imports", 1, Values::NoneOrAny, |f| &mut f.max_imports),
    ("budget-drops", MIB, Values::Positive, |f| &mut f.budget_drops_bytes),
    ("slot-allocation-fails", 1, Values::NoneOrAny, |f| &mut f.max_slots),
    ("max-cache", MIB, Values::NoneOrAny, |f| &mut f.max_cache_bytes),
    ("device-lost-after", 1, Values::Positive, |f| &mut f.device_lost_after),
];

/// What drivers do, by their names.
const PRESETS: &[(&str, &str)] = &[
    ("amdgpu", "refuse-file-import"),
    ("i915", "import-fails-at-copy,one-queue"),
    ("nvidia", "refuse-read-only-import,import-poisons"),
    ("bare", "no-import-extension,one-queue"),
];

/// Values that a number can have.
#[derive(Clone, Copy)]
enum Values {
    Positive,
    /// Up to the largest alignment that Vulkan allows, in KiB.
    Alignment,
    /// Without a value: 0.
    NoneOrAny,
}

impl Values {
    fn allow(self, value: u64) -> bool {
        match self {
            Values::Positive => value > 0,
            Values::Alignment => value.is_power_of_two() && value <= 64,
            Values::NoneOrAny => true,
        }
    }

    fn words(self) -> &'static str {
        match self {
            Values::Positive => "a number from 1 on",
            Values::Alignment => "a power of two up to 64",
            Values::NoneOrAny => "a number, or nothing",
        }
    }
}

impl Faults {
    /// All that a list may name, presets first.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let presets = PRESETS.iter().map(|(name, _)| *name);
        let switches = SWITCHES.iter().map(|(name, _)| *name);
        presets.chain(switches).chain(NUMBERS.iter().map(|(name, ..)| *name))
    }

    /// What the variable `VKMOE_FAULTS` asks for.
    pub fn from_env() -> Result<Self> {
        let list = std::env::var(VARIABLE).unwrap_or_default();
        let faults = Self::parse(&list)?;
        if faults != Self::default() {
            log::warn!("{VARIABLE}: faults are injected: {list}");
        }
        Ok(faults)
    }

    /// Reads a list: `amdgpu,max-buffer=256`.
    pub fn parse(list: &str) -> Result<Self> {
        let mut faults = Self::default();
        for item in list.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            faults.add(item)?;
        }
        Ok(faults)
    }

    fn add(&mut self, item: &str) -> Result<()> {
        let (name, value) = match item.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (item, None),
        };
        if let Some(&(_, unit, values, field)) = NUMBERS.iter().find(|(of, ..)| *of == name) {
            *field(self) = Some(number(name, value, unit, values)?);
            return Ok(());
        }
        if value.is_some() && is_known(name) {
            return Err(Error::usage(VARIABLE, format!("`{name}` takes no value")));
        }
        if let Some((_, field)) = SWITCHES.iter().find(|(of, _)| *of == name) {
            *field(self) = true;
            return Ok(());
        }
        let preset = PRESETS.iter().find(|(of, _)| *of == name);
        let (_, items) = preset.ok_or_else(|| unknown(item))?;
        items.split(',').try_for_each(|item| self.add(item))
    }

    fn late_lane(&self) -> Option<Lane> {
        match (self.late_copies, self.late_kernels) {
            (true, _) => Some(Lane::Copy),
            (false, true) => Some(Lane::Compute),
            (false, false) => None,
        }
    }

    /// Changes what a device reports about itself.
    pub(super) fn apply(&self, info: &mut DeviceInfo) {
        let limits = &mut info.limits;
        if let Some(most) = self.max_buffer_bytes {
            limits.buffer_bytes = limits.buffer_bytes.min(most);
            limits.allocation_bytes = limits.allocation_bytes.min(most);
        }
        if let Some(most) = self.storage_range_bytes {
            limits.storage_range_bytes = limits.storage_range_bytes.min(most);
        }
        if let Some(least) = self.import_alignment_bytes.filter(|_| limits.import_alignment > 0) {
            limits.import_alignment = limits.import_alignment.max(least);
        }
        if self.no_import_extension {
            limits.import_alignment = 0;
            info.optional.external_memory_host = false;
            info.extensions.retain(|name| name.as_c_str() != ext::external_memory_host::NAME);
        }
        if self.one_queue {
            let computes =
                |flags: vk::QueueFlags| u32::from(flags.contains(vk::QueueFlags::COMPUTE));
            let mut left = 1;
            for family in &mut info.queue_families {
                family.count = family.count.min(left).min(computes(family.flags));
                left -= family.count;
            }
        }
    }
}

fn is_known(name: &str) -> bool {
    SWITCHES.iter().any(|(of, _)| *of == name) || PRESETS.iter().any(|(of, _)| *of == name)
}

fn number(name: &str, value: Option<&str>, unit: u64, values: Values) -> Result<u64> {
    let (text, unit) = match value.map(|value| (value, value.strip_suffix("KiB"))) {
        Some((_, Some(kib))) if unit > 1 => (Some(kib), KIB),
        _ => (value, unit),
    };
    let parsed = match (text, values) {
        (None, Values::NoneOrAny) => Some(0),
        (text, _) => text.and_then(|text| text.parse::<u64>().ok()),
    };
    parsed
        .filter(|&value| values.allow(value))
        .and_then(|value| value.checked_mul(unit))
        .ok_or_else(|| {
            let found = value.map_or("no value".to_owned(), |value| format!("`{value}`"));
            Error::usage(VARIABLE, format!("`{name}` takes {}, not {found}", values.words()))
        })
}

fn unknown(item: &str) -> Error {
    let names: Vec<&str> = Faults::names().collect();
    Error::usage(VARIABLE, format!("no fault `{item}`; there are: {}", names.join(", ")))
}

/// The faults of an open device, and what happened to it so far.
pub(super) struct FaultState {
    faults: Faults,
    poisoned: AtomicBool,
    imports: AtomicU64,
    lost: AtomicBool,
    submissions: AtomicU64,
    budget_known: AtomicBool,
    slots: AtomicU32,
    late: Option<Late>,
}

impl FaultState {
    /// `None` if nothing is to go wrong.
    pub(super) fn new(faults: &Faults) -> Option<Box<Self>> {
        (*faults != Faults::default()).then(|| {
            Box::new(Self {
                faults: faults.clone(),
                poisoned: AtomicBool::new(false),
                imports: AtomicU64::new(0),
                lost: AtomicBool::new(false),
                submissions: AtomicU64::new(0),
                budget_known: AtomicBool::new(false),
                slots: AtomicU32::new(0),
                late: faults.late_lane().map(Late::new),
            })
        })
    }

    /// The lane that is late.
    pub(super) fn late(&self) -> Option<&Late> {
        self.late.as_ref()
    }

    /// Whether a fault lost the device.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Once the device is lost every call fails.
    pub(super) fn alive(&self) -> VkResult<()> {
        match self.is_lost() {
            true => Err(vk::Result::ERROR_DEVICE_LOST),
            false => Ok(()),
        }
    }

    /// An import of these pages.
    pub(super) fn import(&self, pages: &[u8]) -> VkResult<()> {
        self.alive()?;
        let poisoned = self.faults.import_poisons && self.poisoned.load(Ordering::Relaxed);
        let before = self.imports.fetch_add(1, Ordering::Relaxed);
        let too_many = self.faults.max_imports.is_some_and(|most| before >= most);
        match poisoned || too_many || self.refuses(pages) {
            true => {
                self.poisoned.store(true, Ordering::Relaxed);
                // What NVIDIA's driver answers; others say INVALID_EXTERNAL_HANDLE or UNKNOWN.
                Err(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY)
            }
            false => Ok(()),
        }
    }

    fn refuses(&self, pages: &[u8]) -> bool {
        let faults = &self.faults;
        let looks = faults.refuse_file_import || faults.refuse_read_only_import;
        if faults.refuse_import || !looks {
            return faults.refuse_import;
        }
        // Where the system does not tell what the pages are, they are refused.
        let Some(areas) = areas_of(pages) else { return true };
        let refused = |area: &Area| {
            (faults.refuse_file_import && area.of_file)
                || (faults.refuse_read_only_import && !area.private_writable)
        };
        areas.iter().any(refused)
    }

    /// The pages that the device reads instead of those imported.
    pub(super) fn pages(&self, pages: &Arc<dyn HostPages>) -> VkResult<Arc<dyn HostPages>> {
        if !self.faults.import_reads_zeros {
            return Ok(pages.clone());
        }
        let zeros = Arena::new("a fault", pages.bytes().len() as u64);
        zeros.map(|zeros| Arc::new(zeros) as _).map_err(|_| vk::Result::ERROR_OUT_OF_HOST_MEMORY)
    }

    /// No memory type is coherent.
    pub(super) fn non_coherent(&self) -> bool {
        self.faults.non_coherent
    }

    /// A submission, which uses imported memory or not.
    pub(super) fn submit(&self, uses_import: bool) -> VkResult<()> {
        self.alive()?;
        let number = self.submissions.fetch_add(1, Ordering::Relaxed) + 1;
        let by_import = uses_import && self.faults.import_fails_at_copy;
        if by_import || self.faults.device_lost_after.is_some_and(|after| number >= after) {
            self.lost.store(true, Ordering::Relaxed);
        }
        self.alive()
    }

    /// The allocation of a buffer; `heaps` gives the true budgets.
    pub(super) fn allocate(
        &self,
        name: &str,
        device_local_bytes: Option<u64>,
        heaps: impl FnOnce() -> Vec<Heap>,
    ) -> VkResult<()> {
        self.alive()?;
        let dropped = self.faults.budget_drops_bytes.filter(|_| self.is_budget_known());
        if let (Some(dropped), Some(bytes)) = (dropped, device_local_bytes) {
            let left = |heap: &Heap| {
                heap.budget_bytes.saturating_sub(dropped).saturating_sub(heap.usage_bytes)
            };
            let local = heaps().into_iter().filter(|heap| heap.device_local);
            if local.map(|heap| left(&heap)).max().is_none_or(|left| left < bytes) {
                return Err(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
            }
        }
        let most = self.faults.max_cache_bytes.filter(|_| name.starts_with(CACHE_PREFIX));
        if most.is_some_and(|most| device_local_bytes.is_some_and(|bytes| bytes > most)) {
            return Err(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
        }
        self.count_slot(name)
    }

    fn count_slot(&self, name: &str) -> VkResult<()> {
        let Some(most) = self.faults.max_slots.filter(|_| name.starts_with(SLOT_PREFIX)) else {
            return Ok(());
        };
        let one_more = |slots: u32| (u64::from(slots) < most).then_some(slots + 1);
        match self.slots.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more) {
            Ok(_) => Ok(()),
            Err(_) => Err(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY),
        }
    }

    /// A buffer is gone that [`Self::allocate`] allowed.
    pub(super) fn free(&self, name: &str) {
        if self.faults.max_slots.is_some() && name.starts_with(SLOT_PREFIX) {
            self.slots.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// What a query of the budgets answers.
    pub(super) fn budget(&self, heaps: &mut [Heap]) {
        let Some(dropped) = self.faults.budget_drops_bytes else { return };
        if self.budget_known.swap(true, Ordering::Relaxed) {
            for heap in heaps.iter_mut().filter(|heap| heap.device_local) {
                heap.budget_bytes = heap.budget_bytes.saturating_sub(dropped);
            }
        }
    }

    fn is_budget_known(&self) -> bool {
        self.budget_known.load(Ordering::Relaxed)
    }
}

/// A piece of the process's memory, as `/proc/self/maps` describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Area {
    start: usize,
    end: usize,
    private_writable: bool,
    of_file: bool,
}

/// What the pages are made of: the areas that they lie in.
fn areas_of(pages: &[u8]) -> Option<Vec<Area>> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let range = pages.as_ptr_range();
    overlapping(&maps, range.start as usize, range.end as usize)
}

/// The areas between two addresses; `None` if they leave a gap, or a line is not understood.
fn overlapping(maps: &str, start: usize, end: usize) -> Option<Vec<Area>> {
    let areas = maps.lines().map(parse_area).collect::<Option<Vec<_>>>()?;
    let found: Vec<Area> =
        areas.into_iter().filter(|area| area.start < end && start < area.end).collect();
    let covered: usize = found.iter().map(|area| area.end.min(end) - area.start.max(start)).sum();
    (covered == end - start).then_some(found)
}

/// `7f0000000000-7f0000001000 rw-p 00000000 fe:00 1234 /path`; inode 0: no file.
fn parse_area(line: &str) -> Option<Area> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let inode = fields.nth(2)?;
    Some(Area {
        start: usize::from_str_radix(start, 16).ok()?,
        end: usize::from_str_radix(end, 16).ok()?,
        private_writable: permissions.starts_with("rw") && permissions.ends_with('p'),
        of_file: inode != "0",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vk::QueueFamily;

    fn state(list: &str) -> Box<FaultState> {
        FaultState::new(&Faults::parse(list).unwrap()).unwrap()
    }

    fn problem(list: &str) -> String {
        Faults::parse(list).unwrap_err().to_string()
    }

    #[test]
    fn lists_and_presets_are_read() {
        assert_eq!(Faults::parse(" , ").unwrap(), Faults::default());
        assert!(FaultState::new(&Faults::default()).is_none());
        let faults = Faults::parse("i915, max-buffer=256,import-alignment=64").unwrap();
        let expected = Faults {
            import_fails_at_copy: true,
            one_queue: true,
            max_buffer_bytes: Some(256 << 20),
            import_alignment_bytes: Some(64 << 10),
            ..Faults::default()
        };
        assert_eq!(faults, expected);
        for (name, items) in PRESETS {
            assert_eq!(Faults::parse(name).unwrap(), Faults::parse(items).unwrap());
        }
        let bytes = |list| Faults::parse(list).unwrap().max_buffer_bytes;
        assert_eq!(bytes("max-buffer=384KiB"), Some(384 << 10));
        let slots = |list| Faults::parse(list).unwrap().max_slots;
        assert_eq!(slots("slot-allocation-fails"), Some(0));
        assert_eq!(slots("slot-allocation-fails=2"), Some(2));
    }

    #[test]
    fn bad_lists_are_refused_in_one_line() {
        let text = problem("refuse-imports");
        assert!(text.starts_with("VKMOE_FAULTS: no fault `refuse-imports`; there are: amdgpu,"));
        assert!(text.contains("device-lost-after") && text.contains("one-queue"), "{text}");
        assert_eq!(problem("one-queue=2"), "VKMOE_FAULTS: `one-queue` takes no value");
        assert_eq!(
            problem("max-buffer"),
            "VKMOE_FAULTS: `max-buffer` takes a number from 1 on, not no value"
        );
        assert_eq!(
            problem("import-alignment=3"),
            "VKMOE_FAULTS: `import-alignment` takes a power of two up to 64, not `3`"
        );
        for list in [
            "device-lost-after=0",
            "device-lost-after=1KiB",
            "max-buffer=-1",
            "max-buffer=0KiB",
            "max-buffer=99999999999999999",
        ] {
            assert!(problem(list).starts_with("VKMOE_FAULTS: `"), "{list}");
        }
    }

    #[test]
    fn limits_are_changed_as_reported() {
        let mut info = DeviceInfo::default();
        info.limits.import_alignment = 4096;
        info.limits.buffer_bytes = 1 << 40;
        info.limits.allocation_bytes = 1 << 20;
        info.extensions = vec![ext::external_memory_host::NAME.to_owned()];
        info.optional.external_memory_host = true;
        let compute = vk::QueueFlags::COMPUTE | vk::QueueFlags::TRANSFER;
        info.queue_families = [vk::QueueFlags::TRANSFER, compute, compute]
            .map(|flags| QueueFamily { flags, count: 4, timestamp_bits: 64 })
            .to_vec();
        Faults::parse("import-alignment=64,max-buffer=256,one-queue").unwrap().apply(&mut info);
        assert_eq!(info.limits.import_alignment, 64 << 10);
        assert_eq!((info.limits.buffer_bytes, info.limits.allocation_bytes), (256 << 20, 1 << 20));
        assert_eq!(info.queue_families.iter().map(|f| f.count).collect::<Vec<_>>(), [0, 1, 0]);
        Faults::parse("bare,import-alignment=64").unwrap().apply(&mut info);
        assert_eq!(info.limits.import_alignment, 0);
        assert!(info.extensions.is_empty() && !info.optional.external_memory_host);
    }

    #[test]
    fn a_lost_device_stays_lost() {
        let faults = state("device-lost-after=3");
        assert_eq!(faults.submit(false), Ok(()));
        assert_eq!(faults.submit(true), Ok(()));
        for _ in 0..2 {
            assert_eq!(faults.submit(false), Err(vk::Result::ERROR_DEVICE_LOST));
        }
        assert!(faults.is_lost() && faults.allocate("kv.k", None, Vec::new).is_err());
        let faults = state("import-fails-at-copy");
        assert_eq!(faults.submit(false), Ok(()));
        assert_eq!(faults.submit(true), Err(vk::Result::ERROR_DEVICE_LOST));
    }

    #[test]
    fn imports_run_out() {
        let faults = state("max-imports=2");
        let results = [0; 4].map(|_| faults.import(&[]).is_ok());
        assert_eq!(results, [true, true, false, false]);
    }

    #[test]
    fn slots_are_counted_while_they_live() {
        let faults = state("slot-allocation-fails=1");
        assert_eq!(faults.allocate("weights.0", Some(1), Vec::new), Ok(()));
        assert_eq!(faults.allocate("slot.0", Some(1), Vec::new), Ok(()));
        assert!(faults.allocate("slot.1", Some(1), Vec::new).is_err());
        faults.free("weights.0");
        assert!(faults.allocate("slot.1", Some(1), Vec::new).is_err());
        faults.free("slot.0");
        assert_eq!(faults.allocate("slot.1", Some(1), Vec::new), Ok(()));
    }

    #[test]
    fn the_budget_drops_after_the_first_query() {
        let faults = state("budget-drops=1");
        let heap = |device_local| Heap {
            bytes: 8 << 20,
            budget_bytes: 4 << 20,
            usage_bytes: 1 << 20,
            device_local,
        };
        let budgets = || {
            let mut heaps = [heap(true), heap(false)];
            faults.budget(&mut heaps);
            heaps.map(|heap| heap.budget_bytes)
        };
        let allocate = |bytes| faults.allocate("slot.0", Some(bytes), || vec![heap(true)]);
        assert_eq!(allocate(3 << 20), Ok(()));
        assert_eq!(budgets(), [4 << 20, 4 << 20]);
        assert_eq!(budgets(), [3 << 20, 4 << 20]);
        assert_eq!(allocate(2 << 20), Ok(()));
        assert!(allocate((2 << 20) + 1).is_err());
    }

    #[test]
    fn areas_are_read_from_the_list_of_mappings() {
        let maps = "\
1000-3000 r--p 00000000 fe:00 77                         /model with a blank.gguf\n\
3000-4000 rw-p 00000000 00:00 0 \n\
4000-5000 rw-s 00000000 00:01 9                          /dev/zero (deleted)\n\
7000-8000 rw-p 00000000 00:00 0                          [heap]\n";
        let kinds = |start, end| {
            let areas = overlapping(maps, start, end)?;
            Some(areas.iter().map(|a| (a.of_file, a.private_writable)).collect::<Vec<_>>())
        };
        assert_eq!(kinds(0x2000, 0x4000), Some(vec![(true, false), (false, true)]));
        assert_eq!(kinds(0x4000, 0x5000), Some(vec![(true, false)]));
        assert_eq!(kinds(0x7000, 0x7001), Some(vec![(false, true)]));
        assert_eq!(kinds(0x4000, 0x8000), None, "a gap");
        assert_eq!(overlapping("no line of that file", 0, 1), None);
    }
}
