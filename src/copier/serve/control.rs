//! Control connection: requests in order, each with a reply.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::gpus::Gpus;
use super::lane::LaneThread;
use super::segments::{Segment, Segments};
use crate::copier::wire::{Refusal, Reply, Request, Socket, VERSION};
use crate::cuda::GpuUuid;

/// Maximum number of lanes: more than there are cores for copying, and 512 MiB of pinned memory.
const LANES_MAX: usize = 64;

/// Serves the connection until its end, or until an invalid request.
pub(super) fn serve(socket: &Socket) {
    let mut control = Control::default();
    while let Ok(Some((request, descriptors))) = socket.receive::<Request>() {
        let (reply, descriptor) = match control.answer(request, descriptors) {
            Ok(answer) => answer,
            Err(refusal) => (Reply::Failed(refusal), None),
        };
        let descriptor = descriptor.as_ref().map(AsRawFd::as_raw_fd);
        if socket.send(&reply, descriptor.as_slice()).is_err() {
            return;
        }
    }
}

#[derive(Debug, Default)]
struct Control {
    gpus: Gpus,
    segments: Arc<Segments>,
}

type Answer = (Reply, Option<OwnedFd>);

impl Control {
    fn answer(&mut self, request: Request, descriptors: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        if descriptors.len() != request.descriptors() {
            let text = format!("{} descriptors were received", descriptors.len());
            return Err(Refusal::Request(text));
        }
        let mut descriptors = descriptors.into_iter();
        let (descriptor, memory) = (descriptors.next(), descriptors.next());
        let done = (Reply::Done, None);
        Ok(match (request, descriptor) {
            (Request::Hello { .. }, _) => (Reply::Hello { version: VERSION }, None),
            (Request::Initialize, _) => {
                self.gpus.api()?;
                done
            }
            (Request::Keys, Some(keys)) => {
                self.gpus.set_keys(keys);
                done
            }
            (Request::Open { gpu }, _) => {
                let room = self.gpus.open(GpuUuid::from_bytes(gpu))?;
                let (free, total) = (room.free, room.total);
                (Reply::Room { free, total }, None)
            }
            (Request::Reserve { gpu, bytes }, _) => {
                self.gpus.reserve(GpuUuid::from_bytes(gpu), bytes)?;
                done
            }
            (Request::Import { gpu, len }, Some(descriptor)) => {
                (self.import(gpu, &descriptor, len)?, None)
            }
            (Request::Create { gpu, len }, _) => self.create(gpu, len)?,
            (Request::Shadow { segments, last }, _) => {
                let bytes = self.gpus.shadow(&self.segments, &segments, last)?;
                (Reply::Shadowed { bytes }, None)
            }
            (Request::Release { segments }, _) => {
                self.segments.remove(&segments)?;
                done
            }
            (Request::Lane, Some(descriptor)) => {
                let memory = memory.ok_or_else(missing)?;
                self.lane(Socket::from(descriptor), &memory)?;
                done
            }
            // The number of descriptors was checked above.
            (Request::Import { .. } | Request::Lane | Request::Keys, None) => return Err(missing()),
        })
    }

    fn import(&self, gpu: [u8; 16], descriptor: &OwnedFd, len: u64) -> Result<Reply, Refusal> {
        use std::os::fd::AsFd;
        let context = self.gpus.context(GpuUuid::from_bytes(gpu))?;
        let memory = context.import(descriptor.as_fd(), len)?;
        let id = self.segments.add(Segment::whole(memory))?;
        Ok(Reply::Segment { id })
    }

    fn create(&self, gpu: [u8; 16], len: u64) -> Result<Answer, Refusal> {
        let context = self.gpus.context(GpuUuid::from_bytes(gpu))?;
        let (memory, descriptor) = context.create(len)?;
        let id = self.segments.add(Segment::whole(memory))?;
        Ok((Reply::Segment { id }, Some(descriptor)))
    }

    fn lane(&self, socket: Socket, memory: &OwnedFd) -> Result<(), Refusal> {
        // Each lane refers to the segments, and so does this thread.
        if Arc::strong_count(&self.segments) > LANES_MAX {
            return Err(Refusal::Request(format!(
                "there are {LANES_MAX} lanes already"
            )));
        }
        let segments = Arc::clone(&self.segments);
        let programs = self.gpus.programs();
        LaneThread::start((socket, memory), self.gpus.contexts(), segments, programs)
    }
}

fn missing() -> Refusal {
    Refusal::request("a descriptor is missing")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: [u8; 16] = [7; 16];

    #[test]
    fn closed_or_missing_memory_is_refused() {
        let mut control = Control::default();
        let requests = [
            Request::Reserve { gpu: GPU, bytes: 1 },
            Request::Create { gpu: GPU, len: 1 },
            Request::Release { segments: vec![1] },
            Request::Shadow {
                segments: vec![u64::MAX],
                last: true,
            },
        ];
        for request in requests {
            let shown = format!("{request:?}");
            let refusal = control.answer(request, Vec::new()).unwrap_err();
            assert!(
                matches!(refusal, Refusal::Request(_)),
                "{shown}: {refusal:?}"
            );
        }
    }

    #[test]
    fn descriptors_are_counted() {
        let mut control = Control::default();
        let descriptor = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let import = Request::Import { gpu: GPU, len: 1 };
        let refusal = control.answer(import, Vec::new()).unwrap_err();
        assert_eq!(refusal, Refusal::request("0 descriptors were received"));
        let hello = Request::Hello { version: VERSION };
        let refusal = control.answer(hello, vec![descriptor()]).unwrap_err();
        assert_eq!(refusal, Refusal::request("1 descriptors were received"));
        let refusal = control
            .answer(Request::Lane, vec![descriptor()])
            .unwrap_err();
        assert_eq!(refusal, Refusal::request("1 descriptors were received"));
        let refusal = control
            .answer(Request::Lane, vec![descriptor(), descriptor()])
            .unwrap_err();
        assert!(matches!(refusal, Refusal::Request(_)), "{refusal:?}");
    }
}
