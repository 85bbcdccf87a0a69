//! Tests of the work queue: when it hands out buffers, and when workers run.

use super::*;

fn work_queue(buffer: u64) -> Arc<WorkQueue> {
    Arc::new(WorkQueue::new(buffer))
}

const TWO_BUFFERS: u64 = 2 * CHUNK_BYTES as u64;

#[test]
fn workers_rest_until_started() {
    let work_queue = work_queue(TWO_BUFFERS);
    work_queue.push(0, 0, work_queue.acquire().unwrap(), 10);
    assert!(!may_work(&locked(&work_queue.state)));
    work_queue.start();
    let taken = work_queue.take();
    assert!(
        matches!(&taken, Some(Work::Piece { stream: 0, position: 0, piece }) if piece.bytes().len() == 10),
        "{taken:?}"
    );
}

#[test]
fn spared_workers_work_before_they_are_started_and_no_others() {
    let work_queue = work_queue(TWO_BUFFERS);
    for position in 0..2 {
        work_queue.push(0, position, work_queue.acquire().unwrap(), 10);
    }
    work_queue.spare(1);
    let first = work_queue.take();
    assert!(matches!(first, Some(Work::Piece { position: 0, .. })));
    assert!(!may_work(&locked(&work_queue.state)), "one is at work");
    work_queue.rest();
    assert!(matches!(
        work_queue.take(),
        Some(Work::Piece { position: 1, .. })
    ));
}

#[test]
fn a_full_buffer_makes_workers_run_before_they_are_started() {
    let work_queue = work_queue(TWO_BUFFERS);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Some(work) = work_queue.take() {
                drop(work);
                work_queue.rest();
            }
        });
        for position in 0..100 {
            let buffer = work_queue.acquire().unwrap();
            work_queue.push(0, position, buffer, CHUNK_BYTES);
        }
        assert!(locked(&work_queue.state).mapped <= 2);
        work_queue.close();
    });
}

#[test]
fn open_streams_beyond_the_buffer_get_one_each() {
    let work_queue = work_queue(TWO_BUFFERS);
    let held: Vec<Buffer> = (0..5).map(|_| work_queue.acquire().unwrap()).collect();
    assert_eq!(held.iter().filter(|buffer| buffer.is_pooled()).count(), 2);
    for buffer in held {
        work_queue.release(buffer);
    }
    assert_eq!(locked(&work_queue.state).free.len(), 2);
}

/// Acquires a buffer in another thread, which is waiting or finished when `then` runs.
fn acquire_while(work_queue: &WorkQueue, then: impl FnOnce()) -> Buffer {
    std::thread::scope(|scope| {
        let acquired = scope.spawn(|| work_queue.acquire().unwrap());
        while locked(&work_queue.state).waiting == 0 && !acquired.is_finished() {
            std::thread::yield_now();
        }
        then();
        acquired.join().unwrap()
    })
}

#[test]
fn a_chunk_in_a_lane_is_waited_for() {
    let work_queue = work_queue(CHUNK_BYTES as u64);
    let (buffer, passing) = (work_queue.acquire().unwrap(), work_queue.passing());
    let next = acquire_while(&work_queue, || {
        work_queue.release(buffer);
        drop(passing);
    });
    assert!(next.is_pooled());
}

#[test]
fn a_lane_that_failed_is_not_waited_for() {
    let work_queue = work_queue(CHUNK_BYTES as u64);
    let (_held, passing) = (work_queue.acquire().unwrap(), work_queue.passing());
    assert!(!acquire_while(&work_queue, || drop(passing)).is_pooled());
}

#[test]
fn ends_of_streams_keep_no_buffer() {
    let work_queue = work_queue(TWO_BUFFERS);
    for stream in 0..1000 {
        work_queue.push_last(stream, 0, work_queue.acquire().unwrap(), 200);
    }
    let state = locked(&work_queue.state);
    assert_eq!((state.free.len(), state.small_bytes), (2, 200_000));
}

#[test]
fn reserving_stays_within_the_limit() {
    let work_queue = work_queue(TWO_BUFFERS);
    work_queue.reserve(u64::MAX);
    let state = locked(&work_queue.state);
    assert_eq!((state.free.len(), state.mapped), (2, 2));
}

#[test]
fn stopping_wakes_a_stream_that_waits() {
    let work_queue = work_queue(CHUNK_BYTES as u64);
    work_queue.push(0, 0, work_queue.acquire().unwrap(), 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| work_queue.acquire());
        work_queue.stop(WriteError::TooManyChunks);
        work_queue.stop(WriteError::Aborted);
        let error = waiting.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, WriteError::Stopped(first) if matches!(**first, WriteError::TooManyChunks))
        );
    });
    assert!(work_queue.take().is_none() && work_queue.check().is_err());
}

#[test]
fn a_piece_that_waits_for_its_next_cut_is_not_waited_for() {
    let work_queue = work_queue(CHUNK_BYTES as u64);
    work_queue.push(0, 0, work_queue.acquire().unwrap(), CHUNK_BYTES);
    work_queue.start();
    let mut kept = None;
    let next = acquire_while(&work_queue, || {
        kept = work_queue.take();
        work_queue.rest();
    });
    assert!(kept.is_some() && !next.is_pooled());
}

#[test]
fn image_fails_if_the_store_hangs_while_the_job_is_frozen() {
    let work_queue = work_queue(CHUNK_BYTES as u64);
    work_queue.limit_stalls(Duration::from_millis(50));
    work_queue.push(0, 0, work_queue.acquire().unwrap(), CHUNK_BYTES);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| work_queue.acquire());
        // A worker that never rests.
        let _taken = work_queue.take();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, WriteError::Stopped(first) if matches!(**first, WriteError::Stalled(_))),
            "{error:?}"
        );
    });
}
