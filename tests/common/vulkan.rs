//! The validation layer in tests: on unless `VKMOE_VALIDATION` says otherwise, and any message fails.

#![allow(dead_code, reason = "not every test binary needs a device")]

use vkmoe::vk::{Instance, Validation};

/// What `VKMOE_VALIDATION` asks for; valid usage if it says nothing.
pub fn validation() -> Validation {
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
