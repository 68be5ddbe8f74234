//! The validation layer in tests: on unless `VKMOE_VALIDATION` says otherwise, and any message fails.

#![allow(dead_code, reason = "not every test binary needs a device")]
#![allow(unreachable_pub, reason = "public to the test binaries that include it")]

use std::sync::OnceLock;
use vkmoe::vk::{Instance, InstanceOptions, Validation};

/// Keeps the drivers loaded until the process ends. Otherwise each test loads and unloads them, and
/// NVIDIA's (580.159) crashes, hangs or is not found after some rounds of that.
pub fn keep_drivers() {
    static KEPT: OnceLock<Instance> = OnceLock::new();
    KEPT.get_or_init(|| Instance::new(InstanceOptions::default()).unwrap());
}

/// What `VKMOE_VALIDATION` asks for; valid usage if it says nothing.
pub fn validation() -> Validation {
    keep_drivers();
    match std::env::var_os("VKMOE_VALIDATION") {
        Some(_) => Validation::from_env().unwrap(),
        None => Validation::Core,
    }
}

/// Fails if the validation layer said anything.
pub fn assert_clean(instance: &Instance) {
    let report = instance.validation_report();
    assert_eq!(instance.validation_messages(), 0, "{report:#?}");
}
