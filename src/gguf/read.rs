//! Positioned reads of tensors: into memory of the caller's, without a page fault for each page, by any
//! number of threads. A tensor of several GiB is read in large requests by all threads of the pool.

use rayon::prelude::*;

use super::{Gguf, TensorInfo};
use crate::error::Result;

/// Requests are no smaller, unless the whole is: one page fault at a time, a disk gives a fifth of this.
const MIN_REQUEST_BYTES: usize = 1 << 20;
/// Requests are no larger, so that all threads end at about the same time.
const MAX_REQUEST_BYTES: usize = 16 << 20;
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
        let start = start_in_file(tensor, offset, to.len());
        let mapping = &self.mappings[tensor.part];
        let request = request_bytes(to.len(), rayon::current_num_threads());
        to.par_chunks_mut(request).enumerate().try_for_each(|(i, piece)| {
            let at = start + (i * request) as u64;
            mapping.will_read(at, piece.len() as u64);
            mapping.read_at(at, piece)
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
        assert_eq!(request_bytes(64 << 20, 4), 4 << 20);
        assert_eq!(request_bytes(1 << 34, 16), MAX_REQUEST_BYTES);
    }
}
