//! Which expert bytes move when: from the host to the device, ahead of need.
//!
//! Reading order: [`options`] (what the user may choose), then the pure part, numbers in and decisions
//! out ([`overlap`]: what was hidden behind what), and at last what touches files and devices.

pub mod options;
pub mod overlap;
