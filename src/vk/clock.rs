//! One clock in nanoseconds for the ticks of all queues and for the host's instants. Pure arithmetic:
//! `calibrate` asks the driver.
//!
//! A device counts ticks of `timestampPeriod` ns, modulo a power of two that each queue family chooses.
//! A [`Calibration`] says what the tick count, the host's clock and [`Instant`] were at one moment; from
//! there all three are extended in both directions. Clocks drift apart by some 20 µs a second, so a long
//! trace calibrates anew now and then.
//!
//! Without calibration the first tick becomes the origin, for all queues alike: Vulkan then promises
//! nothing about ticks of different queues, but every device we know counts them with one counter.

use std::time::Instant;

/// What the origin of an uncalibrated clock is called: earlier moments have a time as well.
const ORIGIN_NS: u64 = 1 << 42;

/// How a queue counts time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TickFormat {
    /// Nanoseconds a tick.
    pub period_ns: f64,
    /// The bits that count; the rest of a tick means nothing.
    pub mask: u64,
}

impl TickFormat {
    /// `bits`: as the queue family says, from 1 to 64.
    pub fn new(period_ns: f32, bits: u32) -> Self {
        let mask = u64::MAX >> (64 - bits.clamp(1, 64));
        TickFormat { period_ns: period_ns.into(), mask }
    }

    /// Time from one tick to a later one, which may have wrapped around once.
    pub fn ns_between(&self, from: u64, to: u64) -> u64 {
        ((to.wrapping_sub(from) & self.mask) as f64 * self.period_ns).round() as u64
    }
}

/// The same moment on three clocks.
#[derive(Clone, Copy, Debug)]
pub struct Calibration {
    /// The device's tick count.
    pub ticks: u64,
    /// The host's clock: `CLOCK_MONOTONIC`, or the performance counter on Windows.
    pub host_ns: u64,
    /// The same host moment as the standard library counts it.
    pub instant: Instant,
    /// How far the three may be apart.
    pub deviation_ns: u64,
}

/// Ticks of a queue to nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    format: TickFormat,
    origin_ticks: u64,
    origin_ns: u64,
}

impl Clock {
    /// On the host's clock. Ticks up to half a wrap-around before or after the calibration are known
    /// (with 36 bits of 52 ns: half an hour).
    pub fn new(calibration: &Calibration, format: TickFormat) -> Self {
        let Calibration { ticks, host_ns, .. } = *calibration;
        Clock { format, origin_ticks: ticks, origin_ns: host_ns }
    }

    /// For a device that cannot be calibrated: `ticks` is the origin. Give all queues the same.
    pub fn uncalibrated(ticks: u64, format: TickFormat) -> Self {
        Clock { format, origin_ticks: ticks, origin_ns: ORIGIN_NS }
    }

    /// When a tick was. Moments before the clock's zero are at zero.
    pub fn to_ns(&self, ticks: u64) -> u64 {
        let Clock { format, origin_ticks, origin_ns } = *self;
        let ahead = ticks.wrapping_sub(origin_ticks) & format.mask;
        match ahead <= format.mask / 2 {
            true => origin_ns.saturating_add(format.ns_between(origin_ticks, ticks)),
            false => origin_ns.saturating_sub(format.ns_between(ticks, origin_ticks)),
        }
    }
}

/// Instants of the host to nanoseconds of the same clock.
#[derive(Clone, Copy, Debug)]
pub struct HostClock {
    origin: Instant,
    origin_ns: u64,
}

impl HostClock {
    /// On the clock of [`Clock::new`].
    pub fn new(calibration: &Calibration) -> Self {
        HostClock { origin: calibration.instant, origin_ns: calibration.host_ns }
    }

    /// For a device that cannot be calibrated: `instant` is taken to be the moment of the tick given to
    /// [`Clock::uncalibrated`]. Close, if it is when the submission that wrote it was made or done.
    pub fn uncalibrated(instant: Instant) -> Self {
        HostClock { origin: instant, origin_ns: ORIGIN_NS }
    }

    /// When an instant was. Moments before the clock's zero are at zero.
    pub fn to_ns(&self, instant: Instant) -> u64 {
        // Over 500 years no longer fit.
        let ns =
            |duration: std::time::Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        match instant.checked_duration_since(self.origin) {
            Some(after) => self.origin_ns.saturating_add(ns(after)),
            None => self.origin_ns.saturating_sub(ns(self.origin.duration_since(instant))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn calibration(ticks: u64, host_ns: u64) -> Calibration {
        Calibration { ticks, host_ns, instant: Instant::now(), deviation_ns: 0 }
    }

    #[test]
    fn a_mask_has_the_bits_of_the_family() {
        assert_eq!(TickFormat::new(1.0, 64).mask, u64::MAX);
        assert_eq!(TickFormat::new(1.0, 36).mask, 0xf_ffff_ffff);
        assert_eq!(TickFormat::new(1.0, 1).mask, 1);
    }

    #[test]
    fn a_counter_that_wraps_goes_on() {
        // 8 bits of 10 ns, calibrated shortly before the wrap; the other bits are noise.
        let clock = Clock::new(&calibration(0xab_fa, 5_000), TickFormat::new(10.0, 8));
        assert_eq!(clock.to_ns(0xfa), 5_000);
        assert_eq!(clock.to_ns(0xcd_ff), 5_050);
        assert_eq!(clock.to_ns(0x00), 5_060);
        assert_eq!(clock.to_ns(0x10), 5_220);
        assert_eq!(clock.to_ns(0xf0), 4_900);
        // The far side of half a round is before.
        assert_eq!(clock.to_ns(0xfa + 0x80), 5_000 - 1_280);
        assert_eq!(Clock::new(&calibration(9, 3), TickFormat::new(1.0, 64)).to_ns(0), 0);
    }

    #[test]
    fn what_is_uncalibrated_still_knows_before_and_after() {
        let format = TickFormat::new(1.0, 36);
        let clock = Clock::uncalibrated(5, format);
        assert_eq!(clock.to_ns(7) - clock.to_ns(5), 2);
        assert_eq!(clock.to_ns(5) - clock.to_ns(format.mask), 6);
        let now = Instant::now();
        let host = HostClock::uncalibrated(now);
        assert_eq!(host.to_ns(now), clock.to_ns(5));
        assert_eq!(host.to_ns(now) - host.to_ns(now - Duration::from_nanos(9)), 9);
    }

    #[test]
    fn instants_are_counted_from_the_calibration() {
        let calibration = calibration(0, 1_000);
        let host = HostClock::new(&calibration);
        let at = |ns| host.to_ns(calibration.instant + Duration::from_nanos(ns));
        assert_eq!((at(0), at(50), at(7_000_000_000)), (1_000, 1_050, 7_000_001_000));
        let earlier = calibration.instant.checked_sub(Duration::from_nanos(300)).unwrap();
        assert_eq!(host.to_ns(earlier), 700);
        let before_zero = calibration.instant.checked_sub(Duration::from_nanos(3_000)).unwrap();
        assert_eq!(host.to_ns(before_zero), 0);
    }

    proptest! {
        /// Wherever the counter stands, a tick that many ticks away is that much time away.
        #[test]
        fn distances_are_kept(
            bits in 20u32..=64,
            at in any::<u64>(),
            noise in any::<u64>(),
            ticks in 0u64..1 << 19,
            period in prop::sample::select(&[1.0f32, 10.0, 52.083_332, 0.5][..]),
        ) {
            let format = TickFormat::new(period, bits);
            let clock = Clock::new(&calibration(at, 1 << 40), format);
            let ns = (ticks as f64 * f64::from(period)).round() as u64;
            let seen = |ticks: u64| clock.to_ns((ticks & format.mask) | (noise & !format.mask));
            prop_assert_eq!(seen(at.wrapping_add(ticks)), (1 << 40) + ns);
            // Half a round exactly may be either side.
            if ticks <= format.mask / 2 {
                prop_assert_eq!(seen(at.wrapping_sub(ticks)), (1 << 40) - ns);
            }
            prop_assert_eq!(format.ns_between(at, at.wrapping_add(ticks)), ns);
        }
    }
}
