//! fetch_experts: matrices of any size and alignment, experts of several tokens, experts that are on the device.

use crate::harness::gpu;
use crate::reference::random::Random;
use vkmoe::push::FetchExperts;

const WORKGROUP: u32 = 64;
const LOADS: u32 = 2;
const N_EXPERT: usize = 7;

#[test]
fn matrices_of_any_size_and_place() {
    for bytes in [1, 15, 16, 210, 4096, 10_007] {
        for (from, to) in [(0, 0), (6, 6), (16, 32), (2, 0)] {
            check(bytes, from, to);
        }
    }
}

/// Matrices of `bytes`, the first `from` bytes into the host's memory and `to` into the slot.
fn check(bytes: usize, from: usize, to: usize) {
    let gpu = gpu();
    let mut random = Random((bytes + from) as u64);
    let host_bytes: Vec<u8> = (0..from + N_EXPERT * bytes).map(|_| random.bits() as u8).collect();
    let host = gpu.upload_weights(&host_bytes);
    let slot = gpu.upload(&vec![0u32; (to + N_EXPERT * bytes).div_ceil(4) + 4]);
    let places =
        |start: u64| -> Vec<u64> { (0..N_EXPERT).map(|e| start + (e * bytes) as u64).collect() };
    let hosts = places(host.address() + from as u64);
    let slots = places(slot.address() + to as u64);
    // Expert 5 is elsewhere.
    let mut tables = hosts.clone();
    tables[5] = 0x1000;
    let ids: Vec<u32> = vec![6, 2, 5, 2, 0, 6];
    let upload = |addresses: &[u64]| gpu.upload(addresses);
    let (tables_on, hosts_on, slots_on) = (upload(&tables), upload(&hosts), upload(&slots));
    let found = upload(&[1; N_EXPERT]);
    let push = FetchExperts {
        tables: tables_on.address(),
        hosts: hosts_on.address(),
        slots: slots_on.address(),
        found: found.address(),
        bytes: bytes as u32,
        n_pairs: ids.len() as u32,
        n_used: 3,
        ..Default::default()
    };
    let grid = [3, ids.len() as u32, 1];
    gpu.run("fetch_experts", &[WORKGROUP, LOADS], &push, &[&gpu.upload(&ids)], grid);

    let expected = [slots[0], 1, slots[2], 1, 1, 0x1000, slots[6]];
    assert_eq!(gpu.read::<u64>(&found), expected, "where experts are found");
    let copied = gpu.read::<u32>(&slot);
    let copied: &[u8] = bytemuck::cast_slice(&copied);
    for e in 0..N_EXPERT {
        let range = to + e * bytes..to + (e + 1) * bytes;
        let source = &host_bytes[from + e * bytes..from + (e + 1) * bytes];
        match [0, 2, 6].contains(&e) {
            true => assert_eq!(&copied[range], source, "{bytes} bytes, {from} to {to}, expert {e}"),
            false => assert!(copied[range].iter().all(|&b| b == 0), "expert {e} was not chosen"),
        }
    }
}
