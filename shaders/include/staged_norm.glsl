// Activations into mat_vec.glsl's tile, with the norm that comes before the product folded in. For
// y = W (s * g) / rms(s), s = x (+ delta), the tile gets s * g, and the squares are summed beside it: each
// workgroup needs all of s anyway, so that the norm is no kernel of its own. What is left to do is to
// multiply each sum with its column's 1 / rms. The workgroups together also store s, each a share of it.
//
// The includer has the specialization constant NORM: 0 = none, 1 = of x, 2 = of x + delta; the push constants
// norm, eps, store_sum (0: s is not stored); the bindings delta4[], sum4[] (both of NORM 2 only).
shared float square_parts[NORM != 0 ? COLS * gl_WorkGroupSize.x / 4 : 1];
float squares[COLS];

// Vectors that a thread has on their way at a time.
const uint STAGED = NORM == 0 ? 4 : 2;

// s * g of column c: vectors first .. n of the row, the tile's from its start. `store`: the workgroup's
// share of s is to be stored.
void stage_column(uint c, uint row, uint first, uint n, bool store) {
    uint group = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
    uint n_groups = gl_NumWorkGroups.x * gl_NumWorkGroups.y;
    for (uint begin = staging_thread(); begin < n; begin += STAGED * gl_WorkGroupSize.x) {
        vec4 s[STAGED];
        vec4 delta[STAGED];
        vec4 norm[STAGED];
        [[unroll]] for (uint j = 0; j < STAGED; j++) {
            uint i = first + begin + j * gl_WorkGroupSize.x;
            s[j] = load_x(row, i);
            if (NORM != 0) {
                uint within = min(i, p.k / 4 - 1);
                delta[j] = NORM == 2 ? delta4[row * (p.k / 4) + within] : vec4(0.0);
                norm[j] = F32x4(p.norm + within * 16).f;
            }
        }
        [[unroll]] for (uint j = 0; j < STAGED; j++) {
            uint i = begin + j * gl_WorkGroupSize.x;
            if (NORM != 0) {
                bool inside = i < n && (first + i) * 4 < p.k;
                s[j] = inside ? s[j] + delta[j] : vec4(0.0);
                squares[c] += dot(s[j], s[j]);
                // Pairs of vectors: whole sectors.
                if (NORM == 2 && p.store_sum != 0 && store && inside && (first + i) / 2 % n_groups == group) {
                    sum4[row * (p.k / 4) + first + i] = s[j];
                }
                s[j] = inside ? s[j] * norm[j] : vec4(0.0);
            }
            if (i < n) {
                put_x(c, i, s[j]);
            }
        }
    }
}

// Stages elements first .. first + CHUNK of all columns. To be called for all chunks of a row in order.
void stage(uint first, uint rows[COLS], bool store) {
    uint n = min(CHUNK, row_units(p.k) * 32 - first) / 4;
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        if (first == 0) {
            squares[c] = 0.0;
        }
        stage_column(c, rows[c], first / 4, n, store);
        if (NORM != 0) {
            float part = subgroupAdd(squares[c]);
            if (gl_SubgroupInvocationID == 0) {
                square_parts[c * gl_NumSubgroups + gl_SubgroupID] = part;
            }
        }
    }
}

// 1 / rms of a column, after all its chunks and a barrier.
float column_scale(uint c) {
    if (NORM == 0) {
        return 1.0;
    }
    float sum = 0.0;
    for (uint i = 0; i < gl_NumSubgroups; i++) {
        sum += square_parts[c * gl_NumSubgroups + i];
    }
    return 1.0 / sqrt(sum / float(p.k) + p.eps);
}
