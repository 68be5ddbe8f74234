//! Which expert bytes move when: from the host to the device, ahead of need.
//!
//! Reading order: [`options`] (what the user may choose), then the pure part, numbers in and decisions
//! out, and at last what touches files and devices.

pub mod options;
pub mod packing;
pub mod chunks;
pub mod rotation;
pub mod gate;
