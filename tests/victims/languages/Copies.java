import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Copies through libcudart from threads of a JVM by JNI, checks every byte, and keeps the collector busy.
 *
 * <p>Ends at SIGTERM with an account and the exit code that it is given: Copies CODE.
 */
class Copies {
    static final int BYTES = 3 << 20;
    static final AtomicLong copies = new AtomicLong(), mismatches = new AtomicLong();
    static volatile boolean stopping;

    static native long allocate(int bytes);

    static native int toDevice(long device, ByteBuffer host, int bytes);

    static native int toHost(ByteBuffer host, long device, int bytes);

    static void must(int code) {
        if (code != 0) {
            System.err.println("libcudart returned " + code);
            Runtime.getRuntime().halt(5);
        }
    }

    static void copy(int seed) {
        long device = allocate(BYTES);
        ByteBuffer source = ByteBuffer.allocateDirect(BYTES), got = ByteBuffer.allocateDirect(BYTES);
        byte[] random = new byte[BYTES];
        new Random(seed).nextBytes(random);
        source.put(0, random);
        while (!stopping) {
            source.put(0, (byte) (source.get(0) + 1));
            must(toDevice(device, source, BYTES));
            must(toHost(got, device, BYTES));
            if (source.mismatch(got) != -1) mismatches.incrementAndGet();
            copies.addAndGet(2);
        }
    }

    static void litter() {
        while (!stopping) {
            List<Object> garbage = new ArrayList<>();
            for (int i = 0; i < 2000; i++) garbage.add(new byte[i]);
            Thread.yield();
        }
    }

    public static void main(String[] args) throws Exception {
        System.loadLibrary("copies_jni");
        List<Thread> threads = new ArrayList<>();
        threads.add(new Thread(() -> copy(1)));
        threads.add(new Thread(() -> copy(2)));
        threads.add(new Thread(Copies::litter));
        // SIGTERM runs this; halt() gives the exit code.
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            stopping = true;
            try {
                for (Thread thread : threads) thread.join();
            } catch (InterruptedException e) {
                return;
            }
            System.out.println("{\"copies\":" + copies + ",\"mismatches\":" + mismatches + "}");
            System.out.flush();
            Runtime.getRuntime().halt(Integer.parseInt(args[0]));
        }));
        for (Thread thread : threads) thread.start();
        while (copies.get() < 4) Thread.sleep(1);
        System.out.println("ready " + ProcessHandle.current().pid());
        for (Thread thread : threads) thread.join();
    }
}
