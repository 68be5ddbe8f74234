// Addresses of all experts' matrices in shared memory: they are fetched while it is not yet known which
// experts are wanted, so that a kernel waits for one load before that of weights, not for two.
// The includer has the constants TABLES and EXPERTS (of a table).
shared uvec2 expert_addresses[TABLES * EXPERTS > 0 ? TABLES * EXPERTS : 1];

// By the whole workgroup, which needs a barrier before expert_address.
void fetch_table(uint which, uint64_t table) {
    for (uint i = gl_LocalInvocationID.x; i < EXPERTS; i += gl_WorkGroupSize.x) {
        expert_addresses[which * EXPERTS + i] = unpackUint2x32(U64s(table).u[i]);
    }
}

uint64_t expert_address(uint which, uint expert) {
    return packUint2x32(expert_addresses[which * EXPERTS + expert]);
}
