//! Which device to use. Pure: data in, index out.

use super::info::DeviceInfo;
use crate::{Error, Result};

const VISIBLE: &str = "GGML_VK_VISIBLE_DEVICES";

/// Picks a device; the result indexes `devices`.
///
/// `wanted` is `--device`: a number, counted as [`visible_devices`] orders them, or a part of the
/// name in any case. Without it the first device that meets the requirements is taken.
/// `visible` is `GGML_VK_VISIBLE_DEVICES`.
pub fn choose(
    devices: &[DeviceInfo],
    wanted: Option<&str>,
    visible: Option<&str>,
) -> Result<usize> {
    let candidates = visible_devices(devices, visible)?;
    let Some(wanted) = wanted else { return first_usable(devices, &candidates) };
    let wanted = wanted.trim();
    let index = match wanted.parse::<usize>() {
        Ok(number) => candidates.get(number).copied(),
        Err(_) => by_name(devices, &candidates, wanted),
    };
    let index = index.ok_or_else(|| {
        let there = list(devices, &candidates);
        Error::usage("--device", format!("no device `{wanted}`; there are: {there}"))
    })?;
    let device = &devices[index];
    if device.missing.is_empty() { Ok(index) } else { Err(Error::NoDevice(lacks(device))) }
}

/// The devices that `GGML_VK_VISIBLE_DEVICES` leaves, as indices into `devices`: its Vulkan indices
/// in its order, as in llama.cpp; all, in the order of `devices`, if it is unset or empty.
pub fn visible_devices(devices: &[DeviceInfo], visible: Option<&str>) -> Result<Vec<usize>> {
    let visible = visible.unwrap_or_default().trim();
    if visible.is_empty() {
        return Ok((0..devices.len()).collect());
    }
    visible.split(',').map(|part| by_vulkan_index(devices, part.trim())).collect()
}

fn by_vulkan_index(devices: &[DeviceInfo], text: &str) -> Result<usize> {
    let number = text.parse::<usize>().map_err(|_| {
        Error::usage(VISIBLE, format!("`{text}` is not a number; write Vulkan indices, as in 0,2"))
    })?;
    devices.iter().position(|device| device.vulkan_index == number).ok_or_else(|| {
        Error::usage(VISIBLE, format!("no device {number}; Vulkan lists {}", devices.len()))
    })
}

fn first_usable(devices: &[DeviceInfo], candidates: &[usize]) -> Result<usize> {
    let usable = |&&index: &&usize| devices[index].missing.is_empty();
    candidates.iter().find(usable).copied().ok_or_else(|| {
        let reasons: Vec<String> = candidates.iter().map(|&index| lacks(&devices[index])).collect();
        Error::NoDevice(match reasons.is_empty() {
            true => "Vulkan lists no device; install a driver for your GPU".into(),
            false => format!("no device meets the requirements: {}", reasons.join("; ")),
        })
    })
}

/// The first device whose name contains `wanted`; one that meets the requirements goes first.
fn by_name(devices: &[DeviceInfo], candidates: &[usize], wanted: &str) -> Option<usize> {
    let wanted = wanted.to_lowercase();
    let matches = |&&index: &&usize| devices[index].name.to_lowercase().contains(&wanted);
    let named: Vec<usize> = candidates.iter().filter(matches).copied().collect();
    let usable = named.iter().find(|&&index| devices[index].missing.is_empty());
    usable.or(named.first()).copied()
}

fn lacks(device: &DeviceInfo) -> String {
    format!("{} lacks {}", device.name, device.missing.join(", "))
}

fn list(devices: &[DeviceInfo], candidates: &[usize]) -> String {
    let names = candidates.iter().enumerate();
    names.map(|(n, &index)| format!("{n} {}", devices[index].name)).collect::<Vec<_>>().join(", ")
}
