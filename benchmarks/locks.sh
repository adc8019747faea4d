#!/usr/bin/env bash
# A lease in C beside pthread_rwlock, std::shared_mutex and mutexes: alone, contended, and a writer among readers.
# locks.sh [seconds per contended measurement [uncontended|contended|fairness]]
exec "$(dirname "$0")/../tests/native/run.sh" bench "$@"
