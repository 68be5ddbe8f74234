#version 460
#include "common.glsl"
#include "reduce.glsl"
// The k largest values of each row, descending, of equals the lower index first; k = 1 is argmax. NaN is
// never chosen; places left over get id 0xffffffff and -inf.
// n_parts workgroups find the best of each of RUNS runs of the row. For each place, the last of them to be
// done takes the best run's best and looks through that run alone for the next one.
// Bindings: 0 logits [n_rows][n], 1 top: ids u32[n_rows][k], then values f32[n_rows][k], 2 best
// uvec2[n_rows][RUNS], 3 status, then a counter for each row.
// Grid: x = n_parts, y = rows.
layout(push_constant, scalar) uniform Push {
    uint n;
    uint n_rows;
    uint n_parts;
    uint k;
} p;
layout(binding = 0, scalar) readonly buffer Logits { float logits[]; };
layout(binding = 1, scalar) writeonly buffer Top { uint ids_and_values[]; };
layout(binding = 2, scalar) coherent buffer Best { uvec2 best_of_run[]; };
layout(binding = 3, scalar) coherent buffer Status { uint status[]; };
#include "last_group.glsl"

const uint RUNS = 512;
const uvec2 NONE = uvec2(0, 0xffffffffu);
shared uvec2 best_of[RUNS]; // order_key, index

bool better(uvec2 a, uvec2 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }

// The best of a thread's share of run c of a row that comes after `last` in the order.
uvec2 scan(uint row, uint c, uint first, uint step, uvec2 last) {
    uint size = (p.n + RUNS - 1) / RUNS;
    uint end = min((c + 1) * size, p.n);
    uvec2 best = NONE;
    for (uint i = c * size + first; i < end; i += step) {
        uvec2 candidate = uvec2(order_key(logits[row * p.n + i]), i);
        if (candidate.x > best.x && better(last, candidate)) {
            best = candidate;
        }
    }
    return best;
}

// This workgroup's part of the runs, one each subgroup at a time.
void find_best_of_runs(uint row) {
    for (uint c = gl_WorkGroupID.x * gl_NumSubgroups + gl_SubgroupID; c < RUNS;
         c += p.n_parts * gl_NumSubgroups) {
        uvec2 best = scan(row, c, gl_SubgroupInvocationID, gl_SubgroupSize, uvec2(0xffffffffu, 0));
        uint top = subgroupMax(best.x);
        uint index = subgroupMin(best.x == top ? best.y : 0xffffffffu);
        if (gl_SubgroupInvocationID == 0) {
            best_of_run[row * RUNS + c] = uvec2(top, index);
        }
    }
}

void find_places(uint row) {
    for (uint c = gl_LocalInvocationID.x; c < RUNS; c += gl_WorkGroupSize.x) {
        best_of[c] = best_of_run[row * RUNS + c];
    }
    for (uint place = 0; place < p.k; ++place) {
        barrier();
        uvec2 best = NONE;
        for (uint c = gl_LocalInvocationID.x; c < RUNS; c += gl_WorkGroupSize.x) {
            best = better(best_of[c], best) ? best_of[c] : best;
        }
        best = group_best(best);
        if (gl_LocalInvocationID.x == 0) {
            bool none = best.x == 0;
            float value = none ? uintBitsToFloat(0xff800000u) : logits[row * p.n + best.y];
            ids_and_values[row * p.k + place] = best.y;
            ids_and_values[(p.n_rows + row) * p.k + place] = floatBitsToUint(value);
        }
        if (best.x == 0 || place + 1 == p.k) {
            continue; // the same on every thread
        }
        uint c = best.y / ((p.n + RUNS - 1) / RUNS);
        uvec2 next = group_best(scan(row, c, gl_LocalInvocationID.x, gl_WorkGroupSize.x, best));
        if (gl_LocalInvocationID.x == 0) {
            best_of[c] = next;
        }
    }
}

void main() {
    uint row = gl_WorkGroupID.y;
    find_best_of_runs(row);
    if (is_last_of(p.n_parts, row)) {
        find_places(row);
    }
}
