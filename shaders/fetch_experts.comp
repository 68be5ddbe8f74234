#version 460
#include "common.glsl"
// Copies the experts that a pass uses from host memory to staging slots, where the kernels after it find them:
// whole and in order, which is how the bus is fast. Kernels that read host memory themselves do so in pieces of
// quantized blocks, and no faster than they multiply.
// For each of up to three expert tensors and each chosen expert e: if tables[e] is where it lies on the host,
// hosts[e], its matrix goes to slots[e], and found[e] = slots[e]; else, in device memory already, found[e] = tables[e].
// Bindings: 0 ids u32[n_pairs], pairs of token and slot; a token's are different.
// Specialization: 1 LOADS: 16-byte loads of an invocation that are on their way.
// Grid: x = parts of a matrix; any number is right, they stride. y = pairs, z = tensors.
layout(constant_id = 1) const uint LOADS = 8;
layout(push_constant, scalar) uniform Push {
    uint64_t tables;  // u64[n_expert]: where kernels find the experts
    uint64_t tables2; // of the second tensor, and so on
    uint64_t tables3;
    uint64_t hosts; // u64[n_expert]: where they are in host memory
    uint64_t hosts2;
    uint64_t hosts3;
    uint64_t slots; // u64[n_expert]: their places in the slot
    uint64_t slots2;
    uint64_t slots3;
    uint64_t found; // u64[n_expert], of which those of chosen experts are written
    uint64_t found2;
    uint64_t found3;
    uint bytes; // of a matrix
    uint bytes2;
    uint bytes3;
    uint n_pairs;
    uint n_used; // pairs of a token
    uint _pad;
} p;
layout(binding = 0, scalar) readonly buffer Ids { uint ids[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Vectors { uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 1) buffer Bytes { uint8_t b[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) writeonly buffer Found { uint64_t a[]; };

uint64_t of_tensor(uint64_t first, uint64_t second, uint64_t third) {
    return gl_WorkGroupID.z == 0 ? first : gl_WorkGroupID.z == 1 ? second : third;
}

// Whether an earlier token chose the expert.
bool is_taken(uint expert) {
    for (uint i = 0; i < gl_WorkGroupID.y / p.n_used * p.n_used; i++) {
        if (ids[i] == expert) {
            return true;
        }
    }
    return false;
}

// The bytes before the first multiple of 16 and after the last; all, if that is not the same in both places.
void copy_ends(uint64_t from, uint64_t to, uint head, uint bytes) {
    uint tail = (bytes - head) % 16;
    uint n_threads = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_WorkGroupID.x * gl_WorkGroupSize.x + gl_LocalInvocationID.x; i < head + tail; i += n_threads) {
        uint at = i < head ? i : bytes - tail + (i - head);
        Bytes(to + at).b[0] = Bytes(from + at).b[0];
    }
}

void main() {
    uint expert = ids[gl_WorkGroupID.y];
    if (is_taken(expert)) {
        return;
    }
    uint64_t from = U64s(of_tensor(p.tables, p.tables2, p.tables3)).u[expert];
    uint64_t host = U64s(of_tensor(p.hosts, p.hosts2, p.hosts3)).u[expert];
    uint64_t to = U64s(of_tensor(p.slots, p.slots2, p.slots3)).u[expert];
    uint bytes = uint(of_tensor(p.bytes, p.bytes2, p.bytes3));
    bool is_far = from == host;
    if (gl_WorkGroupID.x == 0 && gl_LocalInvocationID.x == 0) {
        Found(of_tensor(p.found, p.found2, p.found3)).a[expert] = is_far ? to : from;
    }
    if (!is_far) {
        return;
    }
    bool is_even = (uint(from ^ to) & 15u) == 0;
    uint head = is_even ? min(-uint(from) & 15u, bytes) : bytes;
    copy_ends(from, to, head, bytes);
    Vectors source = Vectors(from + head);
    Vectors target = Vectors(to + head);
    uint n = (bytes - head) / 16;
    uint step = LOADS * gl_WorkGroupSize.x;
    for (uint begin = gl_WorkGroupID.x * step; begin < n; begin += gl_NumWorkGroups.x * step) {
        uvec4 loaded[LOADS];
        [[unroll]] for (uint j = 0; j < LOADS; j++) {
            // Past the end the last one again.
            loaded[j] = source.v[min(begin + j * gl_WorkGroupSize.x + gl_LocalInvocationID.x, n - 1)];
        }
        [[unroll]] for (uint j = 0; j < LOADS; j++) {
            uint i = begin + j * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
            if (i < n) {
                target.v[i] = loaded[j];
            }
        }
    }
}
