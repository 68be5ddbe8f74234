// The last of a dispatch's workgroups to finish goes on with what all of them wrote: which one that is
// depends on timing, what it does not. No workgroup waits for another. The counters are 0 between
// dispatches; dispatches that run beside each other need counters of their own.
//
// The includer has the binding status[], coherent, whose first word is for something else. What the last
// workgroup reads of the others' must be in coherent buffers.
shared bool came_last;

// To be called by the whole workgroup, once it has written: is it the last of n?
bool is_last_of(uint n, uint counter) {
    groupMemoryBarrier();
    barrier();
    if (gl_LocalInvocationID.x == 0) {
        memoryBarrierBuffer();
        came_last = atomicAdd(status[1 + counter], 1) == n - 1;
        memoryBarrierBuffer();
        if (came_last) {
            status[1 + counter] = 0;
        }
    }
    barrier();
    groupMemoryBarrier();
    return came_last;
}
