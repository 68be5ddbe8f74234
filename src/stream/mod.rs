//! Which expert bytes move when: from the host to the device, ahead of need.
//!
//! Reading order: [`options`] (what the user may choose); then the pure part, numbers in and decisions
//! out: [`gate`] (prefetch or not), [`rotation`] (the slot protocol), [`expert_cache`] (which experts lie
//! in spare device memory), [`packing`] and [`chunks`] (where bytes are), [`overlap`] and [`stats`] (what it
//! was worth), [`pin_budget`] (how much may be pinned);
//! then what touches files and devices: [`memory_facts`], [`host_tensor`], [`probe`] (which host source
//! works), [`cpu_speed`] (what the CPU could do instead), [`pins`] (pinning it), [`ring`] (for what is not pinned), [`slots`], `units`, `entries`, [`copies`],
//! [`fetch`] (copies by a kernel), [`streamer`],
//! which puts them together, and [`mod@open`], which sets it up. [`chaos`] is for tests.

pub mod options;
pub mod gate;
pub mod rotation;
pub mod expert_cache;
pub mod packing;
pub mod chunks;
pub mod overlap;
pub mod stats;
pub mod pin_budget;
pub mod memory_facts;
mod mountinfo;
pub mod host_tensor;
pub mod probe;
pub mod cpu_speed;
pub mod pins;
pub mod ring;
pub mod slots;
mod units;
mod entries;
pub mod copies;
pub mod fetch;
pub mod streamer;
pub mod chaos;
pub mod open;

pub use copies::{CopyMarks, CopyRecord};
pub use gate::Outlook;
pub use open::{Route, StreamJob, open, route};
pub use streamer::{Streamer, StreamerParts, Tokens};
