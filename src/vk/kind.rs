//! Sorts of devices and their makers.

use std::fmt;

/// Sort of device, in the order of preference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// A card with memory of its own.
    Discrete,
    /// A GPU that shares the host's memory.
    Integrated,
    /// A virtual machine's.
    Virtual,
    /// A CPU that plays GPU (lavapipe).
    Cpu,
    /// None of these.
    #[default]
    Other,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Discrete => "discrete",
            Self::Integrated => "integrated",
            Self::Virtual => "virtual",
            Self::Cpu => "CPU",
            Self::Other => "other",
        })
    }
}

/// Maker of a device, by PCI id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vendor {
    /// AMD
    Amd,
    /// Intel
    Intel,
    /// NVIDIA
    Nvidia,
    /// Any other, with its id.
    Other(u32),
    /// Not asked.
    #[default]
    Unknown,
}

impl Vendor {
    pub(super) fn from_id(id: u32) -> Self {
        match id {
            0x1002 => Self::Amd,
            0x8086 => Self::Intel,
            0x10de => Self::Nvidia,
            other => Self::Other(other),
        }
    }

    /// The PCI id.
    pub fn id(self) -> u32 {
        match self {
            Self::Amd => 0x1002,
            Self::Intel => 0x8086,
            Self::Nvidia => 0x10de,
            Self::Other(id) => id,
            Self::Unknown => 0,
        }
    }
}
