#version 460
#include "common.glsl"
#include "reduce.glsl"
// The k largest values of each row, descending, of equals the lower index first; k = 1 is argmax. NaN is
// never chosen; places left over get id 0xffffffff and -inf.
// One pass finds the best of each of up to CHUNKS runs of the row. Then each place takes the best run's best and
// looks through that run alone for the next one.
// Of long rows, parts of `part` values are rows of their own first: their results, joined, are a row of the
// second round. MAPPED: the values of a row are such results, with their ids in `map`; where that is
// 0xffffffff there is none.
// Bindings: 0 logits [n_rows][n], 1 ids u32[n_rows][n_parts][k], 2 values likewise, 3 map u32[n_rows][n]
// (MAPPED only), with n_parts = ceil(n / part).
// Spec constants: 1 MAPPED.
// Grid: one item per part of a row.
layout(constant_id = 1) const bool MAPPED = false;
layout(push_constant, scalar) uniform Push {
    uint n;
    uint n_rows;
    uint k;
    uint part;
} p;
layout(binding = 0, scalar) readonly buffer Logits { float logits[]; };
layout(binding = 1, scalar) writeonly buffer Ids { uint ids[]; };
layout(binding = 2, scalar) writeonly buffer Values { float values[]; };
layout(binding = 3, scalar) readonly buffer Map { uint map[]; };

const uint CHUNKS = 512;
const uvec2 NONE = uvec2(0, 0xffffffffu);
shared uvec2 best_of[CHUNKS]; // order_key, index

bool better(uvec2 a, uvec2 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }

// The best of a thread's share of [begin, end) that comes after `last` in the order.
uvec2 scan(uint row, uint begin, uint end, uint first, uint step, uvec2 last) {
    uvec2 best = NONE;
    for (uint i = begin + first; i < end; i += step) {
        uvec2 candidate = uvec2(order_key(logits[row * p.n + i]), i);
        if (MAPPED && map[row * p.n + i] == NONE.y) {
            candidate = NONE;
        }
        if (candidate.x > best.x && better(last, candidate)) {
            best = candidate;
        }
    }
    return best;
}

void main() {
    uint n_parts = (p.n + p.part - 1) / p.part;
    uint item = grid_item();
    uint row = item / n_parts;
    if (row >= p.n_rows) {
        return;
    }
    uint start = item % n_parts * p.part;
    uint stop = min(start + p.part, p.n);
    uint size = max((p.part + CHUNKS - 1) / CHUNKS, gl_SubgroupSize);
    uint n_chunks = (p.part + size - 1) / size;
    for (uint c = gl_SubgroupID; c < n_chunks; c += gl_NumSubgroups) {
        uvec2 best = scan(row, start + c * size, min(start + (c + 1) * size, stop), gl_SubgroupInvocationID, gl_SubgroupSize,
            uvec2(0xffffffffu, 0));
        uint top = subgroupMax(best.x);
        uint index = subgroupMin(best.x == top ? best.y : 0xffffffffu);
        if (gl_SubgroupInvocationID == 0) {
            best_of[c] = uvec2(top, index);
        }
    }
    for (uint place = 0; place < p.k; ++place) {
        barrier();
        uvec2 best = NONE;
        for (uint c = gl_LocalInvocationID.x; c < n_chunks; c += gl_WorkGroupSize.x) {
            best = better(best_of[c], best) ? best_of[c] : best;
        }
        best = group_best(best);
        if (gl_LocalInvocationID.x == 0) {
            uint known = row * p.n + min(best.y, p.n - 1);
            ids[item * p.k + place] = best.x == 0 ? NONE.y : (MAPPED ? map[known] : best.y);
            values[item * p.k + place] = best.x == 0 ? uintBitsToFloat(0xff800000u) : logits[known];
        }
        if (best.x == 0 || place + 1 == p.k) {
            continue; // the same on every thread
        }
        uint c = (best.y - start) / size;
        uvec2 next = group_best(
            scan(row, start + c * size, min(start + (c + 1) * size, stop), gl_LocalInvocationID.x, gl_WorkGroupSize.x, best));
        if (gl_LocalInvocationID.x == 0) {
            best_of[c] = next;
        }
    }
}
