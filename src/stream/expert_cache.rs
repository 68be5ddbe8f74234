//! Which experts lie in spare device memory. Pure: uses and points of the timelines in, decisions out.
//!
//! A unit holds one expert of one layer, all its matrices. Layers whose experts have equal size share a class of
//! units; classes get memory in proportion to what their experts take, so that no byte of a unit is wasted on a
//! layer with smaller ones.
//!
//! An expert is as hot as it is used often and lately: each use counts 1 and fades to a half in 128 tokens ([`Temper`]).
//! An empty unit is filled with the hottest expert on the host; one that is held changes hands only if the newcomer
//! is clearly hotter, since the copy takes time on the bus on which kernels read what is not here.
//!
//! The protocol: while a pass runs, [`choose`](ExpertCache::choose) decides what to promote. Between passes,
//! [`between_passes`](ExpertCache::between_passes) tells what the tables say from now on: evicted experts are on
//! the host again, and those whose copies are done lie in their units. A unit may be overwritten once the pass is
//! done that may still have read it, which is the one before. Nothing ever waits for a promotion.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

/// An expert of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertId {
    /// Among the layers of the cache.
    pub layer: u32,
    /// Within the layer.
    pub expert: u32,
}

/// A place for an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId {
    /// Units of one size.
    pub class: u32,
    /// Within the class.
    pub index: u32,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// A unit for one of them.
    pub unit_bytes: u64,
    /// How many.
    pub n_expert: u32,
}

/// Units of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassShape {
    /// Bytes of a unit.
    pub unit_bytes: u64,
    /// Units, or experts that want one.
    pub n: u32,
}

/// The classes of some layers, each with as many units as there are experts.
pub fn classes(layers: &[LayerShape]) -> Vec<ClassShape> {
    let mut classes: Vec<ClassShape> = Vec::new();
    for layer in layers {
        match classes.iter_mut().find(|class| class.unit_bytes == layer.unit_bytes) {
            Some(class) => class.n += layer.n_expert,
            None => {
                classes.push(ClassShape { unit_bytes: layer.unit_bytes, n: layer.n_expert });
            }
        }
    }
    classes
}

/// Bytes that hold every expert.
pub fn total_bytes(classes: &[ClassShape]) -> u64 {
    classes.iter().map(|class| u64::from(class.n) * class.unit_bytes).sum()
}

/// The same classes with no more units than fit into `capacity_bytes`.
pub fn divide(wanted: &[ClassShape], capacity_bytes: u64) -> Vec<ClassShape> {
    let total = total_bytes(wanted);
    if capacity_bytes >= total {
        return wanted.to_vec();
    }
    let share = |class: &ClassShape| {
        let n = u128::from(class.n) * u128::from(capacity_bytes) / u128::from(total.max(1));
        ClassShape { n: n as u32, ..*class }
    };
    let mut given: Vec<ClassShape> = wanted.iter().map(share).collect();
    let mut left = capacity_bytes - total_bytes(&given);
    // What rounding left is less than a unit of each class.
    for (class, wanted) in given.iter_mut().zip(wanted) {
        if class.n < wanted.n && class.unit_bytes <= left {
            class.n += 1;
            left -= class.unit_bytes;
        }
    }
    given
}

/// What becomes of an expert between two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The expert.
    pub expert: ExpertId,
    /// Where it lies from now on; `None`: on the host only.
    pub unit: Option<UnitId>,
}

/// A copy that may be submitted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// What to copy.
    pub expert: ExpertId,
    /// Where to.
    pub unit: UnitId,
    /// Compute value to wait for on the device; 0: none.
    pub after_compute: u64,
    /// Copy value to wait for on the device; 0: none.
    pub after_copy: u64,
}

/// Values that the timelines have reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reached {
    /// Of the compute lane.
    pub compute: u64,
    /// Of the copy lane.
    pub copy: u64,
}

/// How many experts of a layer a pass used, each counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// In the cache.
    pub hits: u64,
    /// On the host.
    pub misses: u64,
}

/// How fast the cache follows what is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temper {
    /// Tokens after which a use counts a half.
    half_life: f64,
    /// A newcomer must have so many times the heat of what it displaces,
    factor: f64,
    /// and so much more.
    margin: f64,
}

impl Temper {
    /// For work.
    pub const CALM: Temper = Temper { half_life: 128.0, factor: 1.5, margin: 1.0 };
    /// Whatever was used last goes in: for tests.
    pub const RESTLESS: Temper = Temper { half_life: 1.0, factor: 1.0, margin: 0.0 };
}

/// An expert, by its place among all.
type Index = u32;

#[derive(Clone, Copy, Debug)]
struct Expert {
    id: ExpertId,
    /// log2 of the heat that its uses would have had at the first token: the order of two experts stays the same
    /// while neither is used.
    heat: f64,
    at: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Host,
    /// Chosen for a unit, which the tables do not say yet.
    Coming,
    Unit(UnitId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Empty,
    /// A pass that runs may read `old`.
    Leaving {
        old: Index,
        new: Index,
    },
    /// To be copied.
    Due(Index),
    /// Being copied.
    Loading(Index),
    Holds(Index),
}

#[derive(Clone, Copy, Debug)]
struct Unit {
    state: State,
    /// The copy lane's value of its last copy; 0: there was none.
    filled: u64,
    /// The compute lane's value that its next copy comes after.
    free: u64,
}

#[derive(Clone, Debug)]
struct Class {
    unit_bytes: u64,
    experts: Vec<Index>,
    units: Vec<Unit>,
    /// The empty ones, descending.
    empty: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Layer {
    first: Index,
    n_expert: u32,
    n_held: u32,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct ExpertCache {
    temper: Temper,
    layers: Vec<Layer>,
    experts: Vec<Expert>,
    classes: Vec<Class>,
    /// Tokens seen so far.
    now: f64,
    /// Units on their way from one expert to another.
    changing: Vec<UnitId>,
    /// Of those the ones to be copied, in order.
    due: VecDeque<UnitId>,
    changing_bytes: u64,
    n_evicted: u64,
}

impl ExpertCache {
    /// An empty cache. `given`: the units of each of the layers' [`classes`].
    pub fn new(layers: &[LayerShape], given: &[ClassShape], temper: Temper) -> Self {
        let unit = Unit { state: State::Empty, filled: 0, free: 0 };
        let class = |c: &ClassShape| Class {
            unit_bytes: c.unit_bytes,
            experts: Vec::new(),
            units: vec![unit; c.n as usize],
            empty: (0..c.n).rev().collect(),
        };
        let mut cache = ExpertCache {
            temper,
            layers: Vec::new(),
            experts: Vec::new(),
            classes: given.iter().map(class).collect(),
            now: 0.0,
            changing: Vec::new(),
            due: VecDeque::new(),
            changing_bytes: 0,
            n_evicted: 0,
        };
        for (layer, shape) in (0..).zip(layers) {
            let first = cache.experts.len() as Index;
            let class = cache.classes.iter_mut().find(|c| c.unit_bytes == shape.unit_bytes);
            if let Some(class) = class {
                class.experts.extend(first..first + shape.n_expert);
            }
            let expert = |expert| Expert {
                id: ExpertId { layer, expert },
                heat: f64::NEG_INFINITY,
                at: Place::Host,
            };
            cache.experts.extend((0..shape.n_expert).map(expert));
            cache.layers.push(Layer { first, n_expert: shape.n_expert, n_held: 0 });
        }
        cache
    }

    /// The unit in which passes find an expert, as of the last change.
    pub fn unit(&self, id: ExpertId) -> Option<UnitId> {
        match self.experts[self.index(id)?].at {
            Place::Unit(unit) => Some(unit),
            Place::Host | Place::Coming => None,
        }
    }

    /// How many experts of a layer passes find in units.
    pub fn n_held(&self, layer: u32) -> u32 {
        self.layers[layer as usize].n_held
    }

    /// All experts that passes find in units.
    pub fn held(&self) -> impl Iterator<Item = Change> {
        self.experts.iter().filter_map(|expert| match expert.at {
            Place::Unit(unit) => Some(Change { expert: expert.id, unit: Some(unit) }),
            Place::Host | Place::Coming => None,
        })
    }

    /// Experts that had to leave, so far.
    pub fn n_evicted(&self) -> u64 {
        self.n_evicted
    }

    /// So many tokens more went through the model; what they used follows. Result: what each of their uses counts,
    /// which is less where they are many.
    pub fn begin_uses(&mut self, n_tokens: u32) -> f64 {
        let n = f64::from(n_tokens.max(1));
        self.now += n;
        let fades = |tokens: f64| 1.0 - (-tokens / self.temper.half_life).exp2();
        fades(n) / (n * fades(1.0))
    }

    /// Experts of a layer were used, each as often as it is in `ids`. `weight`: of a use.
    pub fn use_experts(&mut self, layer: u32, ids: &mut [u32], weight: f64) -> Uses {
        ids.sort_unstable();
        let (mut uses, now) = (Uses::default(), self.half_lives());
        for same in ids.chunk_by(|a, b| a == b) {
            let Some(&expert) = same.first() else { continue };
            let Some(index) = self.index(ExpertId { layer, expert }) else { continue };
            let known = &mut self.experts[index];
            let heat = (known.heat - now).exp2() + weight * same.len() as f64;
            known.heat = heat.log2() + now;
            match known.at {
                Place::Unit(_) => uses.hits += 1,
                Place::Host | Place::Coming => uses.misses += 1,
            }
        }
        uses
    }

    /// Chooses what to promote, the hottest first, as long as no more than `budget_bytes` are on their way.
    pub fn choose(&mut self, budget_bytes: u64) {
        let room = budget_bytes.saturating_sub(self.changing_bytes);
        let mut wanted: Vec<(f64, usize, Index)> = Vec::new();
        let mut coldest: Vec<Vec<(f64, u32)>> = Vec::new();
        for (c, class) in self.classes.iter().enumerate() {
            let n = (room / class.unit_bytes.max(1)) as usize;
            let hottest = self.hottest(class, n);
            coldest.push(if hottest.is_empty() { Vec::new() } else { self.coldest(class, n) });
            wanted.extend(hottest.into_iter().map(|(heat, index)| (heat, c, index)));
        }
        wanted.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)));
        let mut coldest: Vec<_> = coldest.into_iter().map(Vec::into_iter).collect();
        let mut left = room;
        for (heat, c, index) in wanted {
            if self.classes[c].unit_bytes > left {
                continue;
            }
            let chosen = match self.classes[c].empty.last().copied() {
                Some(unit) => Some(unit),
                None => coldest[c]
                    .next()
                    .filter(|&(cold, _)| self.is_clearly(heat, cold))
                    .map(|(_, unit)| unit),
            };
            let Some(unit) = chosen else {
                // What is less hot has even less of a claim.
                coldest[c] = Vec::new().into_iter();
                continue;
            };
            left -= self.classes[c].unit_bytes;
            self.promote(UnitId { class: c as u32, index: unit }, index);
        }
    }

    /// Whether nothing is on its way.
    pub fn is_settled(&self) -> bool {
        self.changing.is_empty()
    }

    /// No pass runs now: what the tables say from the next one on.
    pub fn between_passes(&mut self, reached: Reached) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut changing = std::mem::take(&mut self.changing);
        changing.retain(|&id| {
            let unit = &mut self.classes[id.class as usize].units[id.index as usize];
            match unit.state {
                State::Leaving { old, new } => {
                    unit.state = State::Due(new);
                    unit.free = reached.compute;
                    self.due.push_back(id);
                    self.n_evicted += 1;
                    changes.push(self.lies(old, None));
                    true
                }
                State::Loading(new) if unit.filled <= reached.copy => {
                    unit.state = State::Holds(new);
                    self.changing_bytes -= self.classes[id.class as usize].unit_bytes;
                    changes.push(self.lies(new, Some(id)));
                    false
                }
                State::Due(_) | State::Loading(_) => true,
                State::Empty | State::Holds(_) => false,
            }
        });
        self.changing = changing;
        changes
    }

    /// The copies that may be submitted now, in order.
    pub fn due(&self) -> impl Iterator<Item = Promotion> {
        self.due.iter().filter_map(|&id| {
            let unit = self.classes[id.class as usize].units[id.index as usize];
            let State::Due(index) = unit.state else { return None };
            let expert = self.experts[index as usize].id;
            let (after_compute, after_copy) = (unit.free, unit.filled);
            Some(Promotion { expert, unit: id, after_compute, after_copy })
        })
    }

    /// The first `n` of [`due`](Self::due) were submitted; the copy lane has `filled` once they are done.
    pub fn copied(&mut self, n: usize, filled: u64) {
        for id in self.due.drain(..n) {
            let unit = &mut self.classes[id.class as usize].units[id.index as usize];
            if let State::Due(index) = unit.state {
                unit.state = State::Loading(index);
                unit.filled = filled;
            }
        }
    }

    fn index(&self, id: ExpertId) -> Option<usize> {
        let layer = self.layers.get(id.layer as usize)?;
        (id.expert < layer.n_expert).then_some((layer.first + id.expert) as usize)
    }

    /// An expert changes its place.
    fn lies(&mut self, index: Index, unit: Option<UnitId>) -> Change {
        let expert = &mut self.experts[index as usize];
        let layer = &mut self.layers[expert.id.layer as usize];
        (expert.at, layer.n_held) = match unit {
            Some(unit) => (Place::Unit(unit), layer.n_held + 1),
            None => (Place::Host, layer.n_held - 1),
        };
        Change { expert: expert.id, unit }
    }

    /// The `n` hottest of a class that are on the host and were ever used.
    fn hottest(&self, class: &Class, n: usize) -> Vec<(f64, Index)> {
        let on_host = class.experts.iter().filter_map(|&index| {
            let expert = self.experts[index as usize];
            let is_wanted = expert.at == Place::Host && expert.heat > f64::NEG_INFINITY;
            is_wanted.then_some((expert.heat, index))
        });
        first(on_host.collect(), n, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)))
    }

    /// The `n` units of a class whose experts are least hot.
    fn coldest(&self, class: &Class, n: usize) -> Vec<(f64, u32)> {
        let held = (0..).zip(&class.units).filter_map(|(i, unit)| match unit.state {
            State::Holds(index) => Some((self.experts[index as usize].heat, i)),
            _ => None,
        });
        first(held.collect(), n, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
    }

    /// Whether a copy pays.
    fn is_clearly(&self, hot: f64, cold: f64) -> bool {
        let heat = |log: f64| (log - self.half_lives()).exp2();
        heat(hot) >= self.temper.factor * heat(cold) + self.temper.margin
    }

    /// Seen so far.
    fn half_lives(&self) -> f64 {
        self.now / self.temper.half_life
    }

    fn promote(&mut self, id: UnitId, new: Index) {
        let class = &mut self.classes[id.class as usize];
        let unit = &mut class.units[id.index as usize];
        unit.state = match unit.state {
            State::Holds(old) => State::Leaving { old, new },
            _ => {
                class.empty.pop();
                self.due.push_back(id);
                State::Due(new)
            }
        };
        self.changing.push(id);
        self.changing_bytes += class.unit_bytes;
        self.experts[new as usize].at = Place::Coming;
    }
}

/// The first `n` in an order.
fn first<T: Copy>(mut all: Vec<T>, n: usize, order: fn(&T, &T) -> std::cmp::Ordering) -> Vec<T> {
    if n < all.len() {
        all.select_nth_unstable_by(n, order);
        all.truncate(n);
    }
    all.sort_unstable_by(order);
    all
}
