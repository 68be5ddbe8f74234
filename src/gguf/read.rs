//! Positioned reads of tensors: into memory of the caller's, without a page fault for each page, by any
//! number of threads. A tensor of several GiB is read in large requests by all threads of the pool.

use std::ops::Range;

use rayon::prelude::*;

use super::{Gguf, TensorInfo};
use crate::error::Result;

/// Bytes of a tensor, and their place in the memory that they are read to.
pub type Part = (Range<u64>, u64);

/// Requests are no smaller, unless the whole is.
const MIN_REQUEST_BYTES: usize = 64 << 10;
/// Requests are no larger, so that all threads end at about the same time.
const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Requests for each thread, so that a slow one does not hold up the rest.
const REQUESTS_PER_THREAD: usize = 4;

impl Gguf {
    /// Fills `to` with a tensor's bytes from `offset` on. Any number of threads may read at a time.
    ///
    /// # Errors
    /// If the file shrank, as [`Gguf::check`] says it, or cannot be read.
    ///
    /// # Panics
    /// If the range is not inside the tensor, or the tensor is of another model.
    pub fn read_at(&self, tensor: &TensorInfo, offset: u64, to: &mut [u8]) -> Result<()> {
        let start = start_in_file(tensor, offset, to.len());
        self.mappings[tensor.part].read_at(start, to)
    }

    /// As [`Self::read_at`], with all threads of rayon's pool and large requests.
    pub fn read_parallel(&self, tensor: &TensorInfo, offset: u64, to: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(to.len() as u64);
        self.read_parts(tensor, &[(offset..end, 0)], to)
    }

    /// Reads parts of a tensor, which ascend, to their places in `to`; what lies between the places
    /// stays as it is. Threads and panics as [`Self::read_parallel`].
    pub fn read_parts(&self, tensor: &TensorInfo, parts: &[Part], mut to: &mut [u8]) -> Result<()> {
        let bytes: u64 = parts.iter().map(|(range, _)| range.end - range.start).sum();
        let request = request_bytes(bytes as usize, rayon::current_num_threads());
        let mut reads: Vec<(u64, &mut [u8])> = Vec::new();
        let mut position = 0;
        for (range, place) in parts {
            let len = (range.end - range.start) as usize;
            let start = start_in_file(tensor, range.start, len);
            let (_, rest) = std::mem::take(&mut to).split_at_mut((place - position) as usize);
            let (target, rest) = rest.split_at_mut(len);
            reads.extend((start..).step_by(request).zip(target.chunks_mut(request)));
            position = place + len as u64;
            to = rest;
        }
        let mapping = &self.mappings[tensor.part];
        reads.into_par_iter().try_for_each(|(at, target)| {
            mapping.will_read(at, target.len() as u64);
            mapping.read_at(at, target)
        })
    }
}

/// Where in the file the byte `offset` of a tensor is.
fn start_in_file(tensor: &TensorInfo, offset: u64, bytes: usize) -> u64 {
    let end = offset.checked_add(bytes as u64);
    assert!(
        end.is_some_and(|end| end <= tensor.bytes),
        "{bytes} bytes at {offset} are outside tensor `{}` of {}",
        tensor.name,
        tensor.bytes
    );
    tensor.offset + offset
}

/// How much of `bytes` each request reads.
fn request_bytes(bytes: usize, n_threads: usize) -> usize {
    let share = bytes.div_ceil(n_threads * REQUESTS_PER_THREAD);
    share.clamp(MIN_REQUEST_BYTES, MAX_REQUEST_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_large_but_leave_work_for_all_threads() {
        assert_eq!(request_bytes(0, 4), MIN_REQUEST_BYTES);
        assert_eq!(request_bytes(1 << 20, 16), MIN_REQUEST_BYTES);
        assert_eq!(request_bytes(8 << 20, 4), 512 << 10);
        assert_eq!(request_bytes(1 << 34, 16), MAX_REQUEST_BYTES);
    }
}
