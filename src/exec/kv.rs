//! The KV cache of a session: two buffers a layer, cells of one token each, row-major
//! `[n_ctx][n_head_kv][head]` in blocks of the cache's type.

use crate::error::{Error, Result};
use crate::graph::KvHalf;
use crate::model::hparams::HParams;
use crate::vk::{Buffer, Device, Lane, MemoryKind, Recorder, Replay};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Type of cached keys or values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "GGUF's names")]
pub enum KvType {
    /// 4 bytes each.
    F32,
    /// 2 bytes each.
    #[default]
    F16,
    /// Blocks of 32 in 34 bytes.
    Q8_0,
    /// Blocks of 32 in 18 bytes.
    Q4_0,
}

impl KvType {
    /// Number of the type in the kernels' specialization constants.
    pub fn spec(self) -> u32 {
        match self {
            KvType::F32 => 0,
            KvType::F16 => 1,
            KvType::Q8_0 => 2,
            KvType::Q4_0 => 3,
        }
    }

    /// Values that the store kernel handles together.
    pub fn unit(self) -> u32 {
        match self {
            KvType::F32 | KvType::F16 => 1,
            KvType::Q8_0 | KvType::Q4_0 => 32,
        }
    }

    /// Bytes of one head's row. Blocks are padded: any head size works with every type.
    pub fn row_bytes(self, head: u32) -> u64 {
        let (head, blocks) = (u64::from(head), u64::from(head.div_ceil(32)));
        match self {
            KvType::F32 => head * 4,
            KvType::F16 => head * 2,
            KvType::Q8_0 => blocks * 34,
            KvType::Q4_0 => blocks * 18,
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Q8_0 => "q8_0",
            KvType::Q4_0 => "q4_0",
        })
    }
}

/// Size and types of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Cells.
    pub n_ctx: u32,
    /// Keys.
    pub type_k: KvType,
    /// Values.
    pub type_v: KvType,
}

impl KvShape {
    /// Bytes of one layer's keys or values.
    fn layer_bytes(&self, hp: &HParams, half: KvHalf) -> u64 {
        let a = &hp.attention;
        let row = match half {
            KvHalf::K => self.type_k.row_bytes(a.head_k),
            KvHalf::V => self.type_v.row_bytes(a.head_v),
        };
        // Kernels read and write whole words.
        (u64::from(self.n_ctx) * u64::from(a.n_head_kv) * row).next_multiple_of(16)
    }

    /// Bytes of the whole cache.
    pub fn bytes(&self, hp: &HParams) -> u64 {
        let layer = self.layer_bytes(hp, KvHalf::K) + self.layer_bytes(hp, KvHalf::V);
        layer * u64::from(hp.n_layer)
    }

    /// Refuses a context whose layers are larger than a kernel can bind.
    pub fn check(&self, hp: &HParams, storage_range_bytes: u64) -> Result<()> {
        let largest = self.layer_bytes(hp, KvHalf::K).max(self.layer_bytes(hp, KvHalf::V));
        if largest <= storage_range_bytes {
            return Ok(());
        }
        let possible = u64::from(self.n_ctx) * storage_range_bytes / largest;
        let problem =
            format!("{} tokens are too many for this device; {possible} are possible", self.n_ctx);
        Err(Error::usage("-c", problem))
    }
}

/// The cache of one session.
pub struct KvCache {
    id: u64,
    shape: KvShape,
    k: Vec<Buffer>,
    v: Vec<Buffer>,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl KvCache {
    /// Allocates the cache and fills it with zeros.
    pub fn new(device: &Arc<Device>, hp: &HParams, shape: KvShape) -> Result<Self> {
        shape.check(hp, device.info().limits.storage_range_bytes)?;
        let buffers = |half, name: &str| -> Result<Vec<Buffer>> {
            let bytes = shape.layer_bytes(hp, half);
            let layer =
                |il| Buffer::new(device, &format!("kv.{name}.{il}"), bytes, MemoryKind::Device);
            (0..hp.n_layer).map(layer).collect()
        };
        let (k, v) = (buffers(KvHalf::K, "k")?, buffers(KvHalf::V, "v")?);
        let mut recorder = Recorder::new(device, Lane::Compute, "kv.clear", Replay::Once)?;
        for buffer in k.iter().chain(&v) {
            recorder.fill(buffer, 0..buffer.bytes(), 0);
        }
        let commands = recorder.finish()?;
        let point = device.submit(Lane::Compute, &[&commands], &[])?;
        device.wait(point, "clearing the KV cache")?;
        Ok(KvCache { id: NEXT_ID.fetch_add(1, Ordering::Relaxed), shape, k, v })
    }

    /// Size and types.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Tells caches apart.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// One layer's keys or values.
    pub fn buffer(&self, il: u32, half: KvHalf) -> &Buffer {
        match half {
            KvHalf::K => &self.k[il as usize],
            KvHalf::V => &self.v[il as usize],
        }
    }
}
