//! Which expert bytes move when: from the host to the device, ahead of need.
//!
//! Reading order: [`options`] (what the user may choose), then the pure part, numbers in and decisions
//! out, and at last what touches files and devices. How much may be pinned: [`pin_budget`] (pure) of
//! [`memory_facts`]; from where: [`probe`].

pub mod options;
pub mod pin_budget;
pub mod memory_facts;
mod mountinfo;
pub mod probe;
