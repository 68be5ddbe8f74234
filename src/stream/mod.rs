//! Which expert bytes move when: from the host to the device, ahead of need.
//!
//! Reading order: [`options`] (what the user may choose), [`stats`] (what the user is told), then the pure
//! part, numbers in and decisions out, and at last what touches files and devices.

pub mod options;
pub mod stats;
