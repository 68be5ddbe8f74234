//! Asks the driver for the same moment on the device's clock and on the host's:
//! `VK_EXT_calibrated_timestamps`, or the same as `VK_KHR_calibrated_timestamps`.
#![allow(unsafe_code, reason = "calls the extension; asks Windows for a frequency")]

use std::time::Instant;

use ash::{ext, khr, vk};

use super::clock::Calibration;
use super::info::DeviceInfo;
use super::instance::Instance;
use super::raw::RawDevice;
use crate::{Error, Result};

/// Samples to take. The narrowest counts: a thread that loses its core in between is far off.
const TRIES: usize = 8;
const NS_PER_SECOND: u64 = 1_000_000_000;

/// Host clocks that will do, best first: the one of [`Instant`], which other tools write as well.
const HOST_CLOCKS: [vk::TimeDomainKHR; 3] = [
    vk::TimeDomainKHR::CLOCK_MONOTONIC,
    vk::TimeDomainKHR::CLOCK_MONOTONIC_RAW,
    vk::TimeDomainKHR::QUERY_PERFORMANCE_COUNTER,
];

/// The extension under the name that is enabled.
enum Extension {
    Ext(ext::calibrated_timestamps::Device),
    Khr(khr::calibrated_timestamps::Device),
}

/// What it takes to calibrate a device; only used while its device lives.
pub(super) struct Calibrator {
    extension: Extension,
    host_clock: vk::TimeDomainKHR,
    /// Ticks of `host_clock` a second.
    host_per_second: u64,
}

impl Calibrator {
    /// `None` if the device lacks the extension, or offers no host clock that we know.
    pub(super) fn new(
        instance: &Instance,
        info: &DeviceInfo,
        raw: &RawDevice,
    ) -> Result<Option<Self>> {
        if !info.optional.calibrated_timestamps {
            return Ok(None);
        }
        let older = info.has_extension(ext::calibrated_timestamps::NAME);
        let extension = match older {
            true => {
                Extension::Ext(ext::calibrated_timestamps::Device::new(instance.raw(), raw.vk()))
            }
            false => {
                Extension::Khr(khr::calibrated_timestamps::Device::new(instance.raw(), raw.vk()))
            }
        };
        let clocks = clocks(instance, info, older)?;
        let known = |clock: &vk::TimeDomainKHR| clocks.contains(clock);
        let host_clock = HOST_CLOCKS.into_iter().find(known);
        let Some(host_clock) = host_clock.filter(|_| known(&vk::TimeDomainKHR::DEVICE)) else {
            log::debug!("{}: cannot be calibrated with the clocks {clocks:?}", info.name);
            return Ok(None);
        };
        let host_per_second = match host_clock {
            vk::TimeDomainKHR::QUERY_PERFORMANCE_COUNTER => performance_counter_per_second(),
            _ => NS_PER_SECOND,
        };
        Ok(Some(Calibrator { extension, host_clock, host_per_second }))
    }

    /// The best of some samples.
    pub(super) fn sample(&self, raw: &RawDevice) -> Result<Calibration> {
        let mut best = self.sample_once(raw)?;
        for _ in 1..TRIES {
            let next = self.sample_once(raw)?;
            if next.deviation_ns < best.deviation_ns {
                best = next;
            }
        }
        Ok(best)
    }

    fn sample_once(&self, raw: &RawDevice) -> Result<Calibration> {
        let clocks = [vk::TimeDomainKHR::DEVICE, self.host_clock];
        let clocks =
            clocks.map(|clock| vk::CalibratedTimestampInfoKHR::default().time_domain(clock));
        let before = Instant::now();
        let sampled = match &self.extension {
            // SAFETY: the caller's device, which the functions were loaded from, is alive; both clocks
            // are among those that it offers.
            Extension::Ext(ext) => unsafe { ext.get_calibrated_timestamps(&clocks) },
            // SAFETY: as above.
            Extension::Khr(khr) => unsafe { khr.get_calibrated_timestamps(&clocks) },
        };
        let taken = before.elapsed();
        let (ticks, apart_ns) =
            sampled.map_err(|result| raw.error("calibrate the clocks", result))?;
        let &[ticks, host_ticks] = ticks.as_slice() else {
            return Err(raw.error("calibrate the clocks", vk::Result::ERROR_UNKNOWN));
        };
        // The moment was within the call.
        let half = taken / 2;
        let half_ns = u64::try_from(half.as_nanos()).unwrap_or(u64::MAX);
        Ok(Calibration {
            ticks,
            host_ns: nanoseconds(host_ticks, self.host_per_second),
            instant: before + half,
            deviation_ns: apart_ns.max(half_ns),
        })
    }
}

/// The clocks that the device can be compared with, its own among them.
fn clocks(instance: &Instance, info: &DeviceInfo, older: bool) -> Result<Vec<vk::TimeDomainKHR>> {
    let (entry, raw) = (instance.entry(), instance.raw());
    let clocks = match older {
        true => {
            let ext = ext::calibrated_timestamps::Instance::new(entry, raw);
            // SAFETY: the physical device is the instance's and has the extension.
            unsafe { ext.get_physical_device_calibrateable_time_domains(info.physical) }
        }
        false => {
            let khr = khr::calibrated_timestamps::Instance::new(entry, raw);
            // SAFETY: as above.
            unsafe { khr.get_physical_device_calibrateable_time_domains(info.physical) }
        }
    };
    clocks
        .map_err(|result| Error::Vulkan { action: "list the clocks of the device".into(), result })
}

/// Ticks as nanoseconds, without losing any to a float.
fn nanoseconds(ticks: u64, per_second: u64) -> u64 {
    let ns = u128::from(ticks) * u128::from(NS_PER_SECOND) / u128::from(per_second.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// The performance counter's frequency, which Windows fixes at start.
#[cfg(windows)]
fn performance_counter_per_second() -> u64 {
    #[link(name = "kernel32")]
    unsafe extern "system" {
        fn QueryPerformanceFrequency(per_second: *mut i64) -> i32;
    }
    let mut per_second = 0;
    // SAFETY: the function writes one value to where it may; since Windows XP it does not fail.
    unsafe { QueryPerformanceFrequency(&mut per_second) };
    u64::try_from(per_second).unwrap_or(NS_PER_SECOND)
}

/// Only Windows has the counter.
#[cfg(not(windows))]
fn performance_counter_per_second() -> u64 {
    NS_PER_SECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_any_frequency_become_nanoseconds() {
        assert_eq!(nanoseconds((1 << 60) + 1, NS_PER_SECOND), (1 << 60) + 1);
        assert_eq!(nanoseconds(25_000_001, 10_000_000), 2_500_000_100);
        assert_eq!(nanoseconds(u64::MAX, 1), u64::MAX);
        assert_eq!(nanoseconds(1, 0), NS_PER_SECOND);
        assert!(performance_counter_per_second() > 0);
    }
}
