//! Where the tensors of a graph live: one arena, in which tensors whose lifetimes do not meet share
//! bytes. Pure: shapes and op order in, offsets out.

use super::{Graph, Tensor};

/// Offsets are multiples of this: no device asks for more of a storage buffer's offset.
pub const SCRATCH_ALIGN: u64 = 256;

/// Offset of every tensor, and the size of the arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// By tensor, in bytes.
    pub offsets: Vec<u64>,
    /// The arena, in bytes.
    pub bytes: u64,
}

/// First and last op that touches a tensor; a tensor that the host fills lives from the start.
fn lifetimes(graph: &Graph) -> Vec<Option<(usize, usize)>> {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; graph.tensors.len()];
    if let Some(Tensor(t)) = graph.tokens {
        lives[t as usize] = Some((0, 0));
    }
    for (i, op) in graph.ops.iter().enumerate() {
        let (reads, writes) = op.access();
        for Tensor(t) in reads.into_iter().chain(writes) {
            let life = &mut lives[t as usize];
            *life = Some((life.map_or(i, |(first, _)| first), i));
        }
    }
    lives
}

/// Places tensors in order of birth at the lowest offset that is free for their whole life.
pub fn plan(graph: &Graph) -> Layout {
    plan_beside(graph, &[])
}

/// The same for a graph some of whose tensors have their place already, outside of the arena.
pub fn plan_beside(graph: &Graph, fixed: &[(Tensor, u64)]) -> Layout {
    let mut lives = lifetimes(graph);
    let mut layout = Layout { offsets: vec![0; lives.len()], bytes: 0 };
    assert_disjoint(&lives, fixed);
    for &(Tensor(t), offset) in fixed {
        layout.offsets[t as usize] = offset;
        lives[t as usize] = None;
    }
    let mut order: Vec<usize> = (0..lives.len()).filter(|&t| lives[t].is_some()).collect();
    order.sort_by_key(|&t| (lives[t], t));
    // Tensors still alive, by offset.
    let mut alive: Vec<(u64, u64, usize)> = Vec::new();
    for t in order {
        let Some((first, last)) = lives[t] else { continue };
        let bytes = graph.tensors[t].bytes().next_multiple_of(SCRATCH_ALIGN);
        alive.retain(|&(_, _, dies)| dies >= first);
        let at = lowest_gap(&alive, bytes);
        let index = alive.partition_point(|&(offset, ..)| offset < at);
        alive.insert(index, (at, at + bytes, last));
        layout.offsets[t] = at;
        layout.bytes = layout.bytes.max(at + bytes);
    }
    layout
}

/// Of two tensors with one place, the last op that touches the first comes before any that touches the
/// second.
fn assert_disjoint(lives: &[Option<(usize, usize)>], fixed: &[(Tensor, u64)]) {
    for (i, &(a, place)) in fixed.iter().enumerate() {
        for &(b, _) in fixed[i + 1..].iter().filter(|(_, other)| *other == place) {
            let life = |t: Tensor| lives[t.0 as usize];
            let meet = life(a).zip(life(b)).is_some_and(|(a, b)| a.1 >= b.0);
            assert!(!meet, "{b:?} overwrites {a:?}, which is still read");
        }
    }
}

/// Places tensors one behind the other: none shares bytes, so that ops can be run again later.
pub fn apart(graph: &Graph) -> Layout {
    let mut layout = Layout::default();
    for shape in &graph.tensors {
        layout.offsets.push(layout.bytes);
        layout.bytes += shape.bytes().next_multiple_of(SCRATCH_ALIGN);
    }
    layout
}

/// The lowest offset with room for `bytes` between the ranges, which are sorted and disjoint.
fn lowest_gap(alive: &[(u64, u64, usize)], bytes: u64) -> u64 {
    let mut at = 0;
    for &(start, end, _) in alive {
        if at + bytes <= start {
            break;
        }
        at = end;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Op;
    use proptest::prelude::*;

    proptest! {
        /// Two tensors that are alive at the same op never share a byte.
        #[test]
        fn living_tensors_are_disjoint(
            sizes in prop::collection::vec((1u32..40, 1u32..300), 2..60),
            picks in prop::collection::vec((any::<u32>(), any::<u32>()), 1..80),
        ) {
            let mut graph = Graph::default();
            for &(rows, cols) in &sizes {
                graph.tensor(rows, cols);
            }
            for &(a, b) in &picks {
                let n = sizes.len() as u32;
                graph.push(Op::CopyRows { x: Tensor(a % n), first: 0, out: Tensor(b % n) });
            }
            let layout = plan(&graph);
            let lives = lifetimes(&graph);
            for a in 0..sizes.len() {
                for b in 0..a {
                    let (Some(la), Some(lb)) = (lives[a], lives[b]) else { continue };
                    let meet = la.0 <= lb.1 && lb.0 <= la.1;
                    let range = |t: usize| {
                        (layout.offsets[t], layout.offsets[t] + graph.tensors[t].bytes())
                    };
                    let (ra, rb) = (range(a), range(b));
                    prop_assert!(!meet || ra.1 <= rb.0 || rb.1 <= ra.0);
                    prop_assert!(ra.1 <= layout.bytes && ra.0 % SCRATCH_ALIGN == 0);
                }
            }
        }
    }
}
