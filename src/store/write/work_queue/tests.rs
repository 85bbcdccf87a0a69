//! Tests of the flow: when it hands out buffers, and when workers run.

use super::*;

fn flow(buffer: u64) -> Arc<Flow> {
    Arc::new(Flow::new(buffer))
}

const TWO_BUFFERS: u64 = 2 * CHUNK_BYTES as u64;

#[test]
fn workers_rest_until_started() {
    let flow = flow(TWO_BUFFERS);
    flow.push(0, 0, flow.acquire().unwrap(), 10);
    assert!(!may_work(&locked(&flow.state)));
    flow.start();
    let taken = flow.take();
    assert!(
        matches!(&taken, Some(Work::Piece { stream: 0, position: 0, piece }) if piece.bytes().len() == 10),
        "{taken:?}"
    );
}

#[test]
fn spared_workers_work_before_they_are_started_and_no_others() {
    let flow = flow(TWO_BUFFERS);
    for position in 0..2 {
        flow.push(0, position, flow.acquire().unwrap(), 10);
    }
    flow.spare(1);
    let first = flow.take();
    assert!(matches!(first, Some(Work::Piece { position: 0, .. })));
    assert!(!may_work(&locked(&flow.state)), "one is at work");
    flow.rest();
    assert!(matches!(flow.take(), Some(Work::Piece { position: 1, .. })));
}

#[test]
fn a_full_buffer_makes_workers_run_before_they_are_started() {
    let flow = flow(TWO_BUFFERS);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Some(work) = flow.take() {
                drop(work);
                flow.rest();
            }
        });
        for position in 0..100 {
            let buffer = flow.acquire().unwrap();
            flow.push(0, position, buffer, CHUNK_BYTES);
        }
        assert!(locked(&flow.state).mapped <= 2);
        flow.close();
    });
}

#[test]
fn open_streams_beyond_the_buffer_get_one_each() {
    let flow = flow(TWO_BUFFERS);
    let held: Vec<Buffer> = (0..5).map(|_| flow.acquire().unwrap()).collect();
    assert_eq!(held.iter().filter(|buffer| buffer.is_pooled()).count(), 2);
    for buffer in held {
        flow.release(buffer);
    }
    assert_eq!(locked(&flow.state).free.len(), 2);
}

/// Acquires in another thread, which is waiting or done when `then` runs.
fn acquire_while(flow: &Flow, then: impl FnOnce()) -> Buffer {
    std::thread::scope(|scope| {
        let acquired = scope.spawn(|| flow.acquire().unwrap());
        while locked(&flow.state).waiting == 0 && !acquired.is_finished() {
            std::thread::yield_now();
        }
        then();
        acquired.join().unwrap()
    })
}

#[test]
fn a_chunk_in_a_lane_is_waited_for() {
    let flow = flow(CHUNK_BYTES as u64);
    let (buffer, passing) = (flow.acquire().unwrap(), flow.passing());
    let next = acquire_while(&flow, || {
        flow.release(buffer);
        drop(passing);
    });
    assert!(next.is_pooled());
}

#[test]
fn a_lane_that_failed_is_not_waited_for() {
    let flow = flow(CHUNK_BYTES as u64);
    let (_held, passing) = (flow.acquire().unwrap(), flow.passing());
    assert!(!acquire_while(&flow, || drop(passing)).is_pooled());
}

#[test]
fn ends_of_streams_keep_no_buffer() {
    let flow = flow(TWO_BUFFERS);
    for stream in 0..1000 {
        flow.push_last(stream, 0, flow.acquire().unwrap(), 200);
    }
    let state = locked(&flow.state);
    assert_eq!((state.free.len(), state.small_bytes), (2, 200_000));
}

#[test]
fn reserving_stays_within_the_limit() {
    let flow = flow(TWO_BUFFERS);
    flow.reserve(u64::MAX);
    let state = locked(&flow.state);
    assert_eq!((state.free.len(), state.mapped), (2, 2));
}

#[test]
fn stopping_wakes_a_stream_that_waits() {
    let flow = flow(CHUNK_BYTES as u64);
    flow.push(0, 0, flow.acquire().unwrap(), 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| flow.acquire());
        flow.stop(WriteError::TooManyChunks);
        flow.stop(WriteError::Aborted);
        let error = waiting.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, WriteError::Stopped(first) if matches!(**first, WriteError::TooManyChunks))
        );
    });
    assert!(flow.take().is_none() && flow.check().is_err());
}

#[test]
fn a_piece_that_waits_for_its_next_cut_is_not_waited_for() {
    let flow = flow(CHUNK_BYTES as u64);
    flow.push(0, 0, flow.acquire().unwrap(), CHUNK_BYTES);
    flow.start();
    let mut kept = None;
    let next = acquire_while(&flow, || {
        kept = flow.take();
        flow.rest();
    });
    assert!(kept.is_some() && !next.is_pooled());
}

#[test]
fn a_store_that_hangs_is_not_waited_for_while_a_job_stands_still() {
    let flow = flow(CHUNK_BYTES as u64);
    flow.limit_stalls(Duration::from_millis(50));
    flow.push(0, 0, flow.acquire().unwrap(), CHUNK_BYTES);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| flow.acquire());
        // A worker that never rests.
        let _taken = flow.take();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, WriteError::Stopped(first) if matches!(**first, WriteError::Stalled(_))),
            "{error:?}"
        );
    });
}
