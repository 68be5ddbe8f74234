#version 460
#include "common.glsl"
#include "reduce.glsl"
// Sorts the pairs (token, slot) by expert, within an expert by index, and cuts each expert's run into
// tiles for the grouped matrix product. Each expert finds its own run: no atomics, one order.
// Bindings: 0 ids u32[n_pairs], 1 counts u32[n_expert], 2 pairs u32[n_pairs],
//   3 tiles u32[n_tiles_max][3]: expert, first place in pairs, count <= tile; expert 0xffffffff = unused.
//   n_tiles_max >= ceil(n_pairs / tile) + min(n_expert, n_pairs).
// Grid: one item per expert.
layout(push_constant, scalar) uniform Push {
    uint n_pairs;
    uint n_expert;
    uint tile;
    uint n_tiles_max;
} p;
layout(binding = 0, scalar) readonly buffer Ids { uint ids[]; };
layout(binding = 1, scalar) readonly buffer Counts { uint counts[]; };
layout(binding = 2, scalar) writeonly buffer Pairs { uint pairs[]; };
layout(binding = 3, scalar) writeonly buffer Tiles { uint tiles[]; };

shared uint found[REDUCE_SLOTS]; // pairs of this expert in each subgroup's part of the list

void store_tile(uint at, uint expert, uint first, uint count) {
    if (at < p.n_tiles_max) {
        tiles[at * 3] = expert;
        tiles[at * 3 + 1] = first;
        tiles[at * 3 + 2] = count;
    }
}

void store_tiles(uint expert, uint first, uint first_tile) {
    uint n_tiles = (counts[expert] + p.tile - 1) / p.tile;
    for (uint i = gl_LocalInvocationID.x; i < n_tiles; i += gl_WorkGroupSize.x) {
        store_tile(first_tile + i, expert, first + i * p.tile, min(p.tile, counts[expert] - i * p.tile));
    }
    if (expert == p.n_expert - 1) {
        for (uint i = first_tile + n_tiles + gl_LocalInvocationID.x; i < p.n_tiles_max; i += gl_WorkGroupSize.x) {
            store_tile(i, 0xffffffffu, 0, 0);
        }
    }
}

// Each subgroup has a contiguous part of the list: it counts, then writes behind the parts before.
void store_pairs(uint expert, uint first) {
    uint steps = (p.n_pairs + gl_WorkGroupSize.x - 1) / gl_WorkGroupSize.x;
    uint begin = gl_SubgroupID * steps * gl_SubgroupSize;
    uint end = min(begin + steps * gl_SubgroupSize, p.n_pairs);
    uint count = 0;
    for (uint q = begin + gl_SubgroupInvocationID; q < end; q += gl_SubgroupSize) {
        count += uint(ids[q] == expert);
    }
    count = subgroupAdd(count);
    if (gl_SubgroupInvocationID == 0) {
        found[gl_SubgroupID] = count;
    }
    barrier();
    uint to = first;
    for (uint i = 0; i < gl_SubgroupID; ++i) {
        to += found[i];
    }
    uint stop = to + count;
    for (uint at = begin; at < end && to < stop; at += gl_SubgroupSize) {
        uint q = at + gl_SubgroupInvocationID;
        uint hit = q < end && ids[q] == expert ? 1 : 0;
        uint place = to + subgroupExclusiveAdd(hit);
        if (hit == 1) {
            pairs[place] = q;
        }
        to += subgroupAdd(hit);
    }
}

void main() {
    uint expert = grid_item();
    if (expert >= p.n_expert) {
        return;
    }
    uint before = 0;
    uint tiles_before = 0;
    for (uint e = gl_LocalInvocationID.x; e < expert; e += gl_WorkGroupSize.x) {
        before += counts[e];
        tiles_before += (counts[e] + p.tile - 1) / p.tile;
    }
    before = group_sum(before);
    tiles_before = group_sum(tiles_before);
    store_tiles(expert, before, tiles_before);
    if (counts[expert] != 0) {
        store_pairs(expert, before);
    }
}
