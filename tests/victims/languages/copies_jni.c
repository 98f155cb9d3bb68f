/* The native half of Copies.java. */
#include <jni.h>
#include <stdint.h>

int cudaMalloc(void **address, size_t bytes);
int cudaMemcpy(void *destination, const void *source, size_t bytes, int kind);

JNIEXPORT jlong JNICALL Java_Copies_allocate(JNIEnv *env, jclass class, jint bytes)
{
    void *device = NULL;
    (void)env, (void)class;
    return cudaMalloc(&device, (size_t)bytes) ? 0 : (jlong)(intptr_t)device;
}

JNIEXPORT jint JNICALL Java_Copies_toDevice(JNIEnv *env, jclass class, jlong device, jobject host, jint bytes)
{
    (void)class;
    return cudaMemcpy((void *)(intptr_t)device, (*env)->GetDirectBufferAddress(env, host), (size_t)bytes, 1);
}

JNIEXPORT jint JNICALL Java_Copies_toHost(JNIEnv *env, jclass class, jobject host, jlong device, jint bytes)
{
    (void)class;
    return cudaMemcpy((*env)->GetDirectBufferAddress(env, host), (void *)(intptr_t)device, (size_t)bytes, 2);
}
