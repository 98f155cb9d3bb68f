// Copies through libcudart from goroutines by cgo, checks every byte, and keeps the scheduler and the collector busy.
//
// Ends at SIGTERM with an account and the exit code that it is given: copies CODE.
package main

// int cudaMalloc(void **, unsigned long);
// int cudaMemcpy(void *, const void *, unsigned long, int);
import "C"

import (
	"bytes"
	"fmt"
	"math/rand"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

const size = 3 << 20
const toDevice, toHost = 1, 2

var copies, mismatches, collected int64
var stopping int32

func must(code C.int) {
	if code != 0 {
		fmt.Fprintln(os.Stderr, "libcudart returned", code)
		os.Exit(5)
	}
}

func copyOn(seed int64) {
	var device unsafe.Pointer
	must(C.cudaMalloc(&device, size))
	source, got := make([]byte, size), make([]byte, size)
	rand.New(rand.NewSource(seed)).Read(source)
	for atomic.LoadInt32(&stopping) == 0 {
		source[0]++
		must(C.cudaMemcpy(device, unsafe.Pointer(&source[0]), size, toDevice))
		must(C.cudaMemcpy(unsafe.Pointer(&got[0]), device, size, toHost))
		if !bytes.Equal(source, got) {
			atomic.AddInt64(&mismatches, 1)
		}
		atomic.AddInt64(&copies, 2)
	}
}

// Preempted by signals, and a source of garbage.
func litter() {
	for atomic.LoadInt32(&stopping) == 0 {
		block := make([]*int, 1<<12)
		for i := range block {
			block[i] = new(int)
		}
		atomic.AddInt64(&collected, int64(len(block)))
		time.Sleep(50 * time.Microsecond)
	}
}

func main() {
	code, _ := strconv.Atoi(os.Args[1])
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	var all sync.WaitGroup
	run := func(work func()) {
		all.Add(1)
		go func() { defer all.Done(); work() }()
	}
	for seed := int64(1); seed <= 2; seed++ {
		seed := seed
		run(func() { copyOn(seed) })
	}
	run(litter)
	for atomic.LoadInt64(&copies) < 4 {
		time.Sleep(time.Millisecond)
	}
	fmt.Printf("ready %d\n", os.Getpid())
	<-stop
	atomic.StoreInt32(&stopping, 1)
	all.Wait()
	fmt.Printf("{\"copies\":%d,\"mismatches\":%d}\n", copies, mismatches)
	os.Exit(code)
}
