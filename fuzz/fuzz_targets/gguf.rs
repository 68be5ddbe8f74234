//! Any bytes are a header or an error, never a panic; and what a header states lies in the bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vkmoe::gguf::Gguf;

fuzz_target!(|data: &[u8]| {
    let Ok(header) = Gguf::parse_bytes(data) else { return };
    for tensor in &header.tensors {
        assert!(tensor.bytes > 0 && tensor.end() <= data.len() as u64);
    }
    for (key, _) in header.metadata.iter() {
        assert!(header.metadata.get(key).is_some());
    }
});
